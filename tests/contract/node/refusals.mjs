// One request; writes how often it was sent, what came of it, and how long the client took.
//   node refusals.mjs BASE_URL RECORDING MAX_RETRIES FIELDS API_KEY
import fs from "node:fs";
import OpenAI, { toFile } from "openai";

const [baseURL, recording, maxRetries, fields, apiKey] = process.argv.slice(2);
let numSent = 0;
const counting = (url, init) => {
  if (String(url).startsWith("http")) numSent += 1; // it tries fetch on a data: address first
  return fetch(url, init);
};
const client = new OpenAI({ baseURL, apiKey, maxRetries: Number(maxRetries), fetch: counting });
const file = await toFile(fs.readFileSync(recording), "speech.wav");
const startedAt = performance.now();
const result = {};
try {
  const answer = await client.audio.transcriptions.create({ file, model: "whisper-1", ...JSON.parse(fields) });
  result.text = answer.text;
} catch (error) {
  const { status, code, param, type, requestID } = error;
  Object.assign(result, { error: error.constructor.name, status, code, param, type, requestID });
}
console.log(JSON.stringify({ ...result, numSent, took_s: (performance.now() - startedAt) / 1000 }));
