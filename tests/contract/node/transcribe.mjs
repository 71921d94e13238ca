// Every way the official client has to ask for a transcript; writes what came of each as one JSON object.
//   node transcribe.mjs BASE_URL RECORDING
import fs from "node:fs";
import OpenAI, { toFile } from "openai";

const [baseURL, recording] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const bytes = fs.readFileSync(recording);
const model = "whisper-1";
const create = (fields) => client.audio.transcriptions.create({ model, ...fields });
const results = {};

await Promise.all(
  ["json", "text", "srt", "vtt", "verbose_json"].map(async (response_format) => {
    results[response_format] = await create({ file: fs.createReadStream(recording), response_format });
  }),
);
results.words = await create({
  file: fs.createReadStream(recording),
  response_format: "verbose_json",
  timestamp_granularities: ["word", "segment"],
});
results.logprobs = await create({ file: fs.createReadStream(recording), include: ["logprobs"] });

const files = {
  stream: () => fs.createReadStream(recording),
  file: () => new File([bytes], "speech.wav"),
  buffer: () => toFile(bytes, "speech.wav"),
  bytes: () => toFile(new Uint8Array(bytes)),
  response: () => new Response(bytes),
};
results.files = {};
await Promise.all(
  Object.entries(files).map(async ([name, open]) => {
    results.files[name] = (await create({ file: await open() })).text;
  }),
);

results.events = [];
for await (const event of await create({ file: fs.createReadStream(recording), stream: true })) {
  results.events.push(event);
}
results.options = await create({
  file: fs.createReadStream(recording),
  language: "en",
  temperature: 0,
  chunking_strategy: { type: "server_vad", threshold: 0.5 },
});
results.models = [];
for await (const served of client.models.list()) results.models.push(served.id);
const { response, request_id } = await client.audio.transcriptions
  .create({ model, file: await toFile(bytes, "speech.wav") })
  .withResponse();
results.request_id = [request_id, response.headers.get("x-request-id")];
console.log(JSON.stringify(results));
