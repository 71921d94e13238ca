// A realtime session of the official client; writes every event, a line each, up to the last turn's text.
//   node realtime.mjs BASE_URL RECORDING_OF_24_KHZ_PCM NUM_TURNS
import fs from "node:fs";
import OpenAI from "openai";
import { OpenAIRealtimeWS } from "openai/realtime/ws";

const [baseURL, recording, numTurns] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none" });
const session = await OpenAIRealtimeWS.create(client, { intent: "transcription" });
let numCompleted = 0;
session.on("event", (event) => {
  console.log(JSON.stringify(event));
  if (event.type.endsWith("transcription.completed") && ++numCompleted === Number(numTurns)) session.close();
});
session.on("error", (error) => {
  console.error(error);
  process.exit(1);
});
session.on("session.created", async () => {
  const bytes = fs.readFileSync(recording);
  for (let at = 0; at < bytes.length; at += 4800) {
    const audio = bytes.subarray(at, at + 4800).toString("base64");
    session.send({ type: "input_audio_buffer.append", audio });
    await new Promise((resolve) => setTimeout(resolve, 20));
  }
});
