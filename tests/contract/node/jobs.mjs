// A job, files and a batch by the official client; writes what came of each as one JSON object.
//   node jobs.mjs BASE_URL RECORDING
import fs from "node:fs";
import OpenAI, { toFile } from "openai";

const [baseURL, recording] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const endpoint = "/v1/audio/transcriptions";
const results = {};

const metadata = { case: "7" };
const fields = { model: "whisper-1", background: true, metadata };
results.accepted = await client.audio.transcriptions.create({ file: fs.createReadStream(recording), ...fields });
const path = `/audio/transcriptions/${results.accepted.id}`;
do results.job = await client.get(path, { query: { wait: 30 } });
while (["queued", "in_progress"].includes(results.job.status));
results.content = await client.get(`${path}/content`);

const talk = await client.files.create({ file: fs.createReadStream(recording), purpose: "user_data" });
const lines = ["a", "b"].map((custom_id) =>
  JSON.stringify({ custom_id, method: "POST", url: endpoint, body: { model: "whisper-1", file_id: talk.id } }),
);
const input = await client.files.create({ file: await toFile(Buffer.from(lines.join("\n")), "lines.jsonl"), purpose: "batch" });
let batch = await client.batches.create({ input_file_id: input.id, endpoint, completion_window: "24h", metadata });
while (batch.status === "in_progress") {
  await new Promise((resolve) => setTimeout(resolve, 50));
  batch = await client.batches.retrieve(batch.id);
}
results.output = await (await client.files.content(batch.output_file_id)).text();
results.recording = Buffer.from(await (await client.files.content(talk.id)).arrayBuffer()).equals(fs.readFileSync(recording));
results.batches = [batch, await client.batches.cancel(batch.id)];
for await (const each of client.batches.list({ limit: 1 })) results.batches.push(each);
results.files = [talk, input, await client.files.retrieve(batch.output_file_id)];
for await (const each of client.files.list({ limit: 1, order: "asc" })) results.files.push(each);
results.deleted = await client.files.delete(talk.id);
console.log(JSON.stringify(results));
