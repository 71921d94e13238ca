// Vercel's AI SDK, by base URL alone: node transcribe.mjs RECORDING BASE_URL
import { readFile } from "node:fs/promises";
import { createOpenAI } from "@ai-sdk/openai";
import { experimental_transcribe as transcribe } from "ai";

const [recording, baseURL] = process.argv.slice(2);
const openai = createOpenAI({ baseURL, apiKey: "none" });
const audio = await readFile(recording);

for (const name of ["whisper-1", "gpt-4o-transcribe"]) {
    const plain = await transcribe({ model: openai.transcription(name), audio });
    console.log(`${name}: ${plain.text}`);
    const providerOptions = { openai: { language: "en" } };
    const options = await transcribe({ model: openai.transcription(name), audio, providerOptions });
    console.log(`${name} with options: ${options.text}, ${options.segments.length > 0}`);
}
