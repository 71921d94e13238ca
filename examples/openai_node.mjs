// OpenAI's Node client: text, the times of words, and text as it comes.
//   npm install openai
//   node openai_node.mjs [RECORDING] [BASE_URL]
import fs from "node:fs";
import OpenAI from "openai";

const [recording = "examples/speech.wav", baseURL = "http://127.0.0.1:8000/v1"] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: process.env.OPENAI_API_KEY ?? "none" });
const model = "whisper-1";

const answer = await client.audio.transcriptions.create({ file: fs.createReadStream(recording), model });
console.log(answer.text);

const verbose = await client.audio.transcriptions.create({
  file: fs.createReadStream(recording),
  model,
  response_format: "verbose_json",
  timestamp_granularities: ["word", "segment"],
});
for (const { start, end, word } of verbose.words) {
  console.log(`${start.toFixed(2).padStart(7)} ${end.toFixed(2).padStart(7)} ${word}`);
}

const stream = await client.audio.transcriptions.create({
  file: fs.createReadStream(recording),
  model,
  stream: true,
});
for await (const event of stream) {
  if (event.type === "transcript.text.delta") process.stdout.write(event.delta);
}
console.log();
