// The microphone's samples as 16-bit PCM at 24 kHz, 100 ms a message.

const RATE = 24000;
const BLOCK = RATE / 10;

class PcmWriter extends AudioWorkletProcessor {
  constructor() {
    super();
    this.block = new Int16Array(BLOCK);
    this.filled = 0;
    this.position = 0; // of the next output sample, in input samples behind `last`
    this.last = 0;
    this.hasEnded = false;
    this.port.onmessage = () => this.end();
  }

  process([[samples]]) {
    if (samples && !this.hasEnded) this.resample(samples);
    return !this.hasEnded;
  }

  /** Gives the block begun, and an empty one behind which nothing comes. */
  end() {
    this.port.postMessage(this.block.slice(0, this.filled));
    if (this.filled) this.port.postMessage(new Int16Array(0));
    this.hasEnded = true;
  }

  /** Linear between neighbours; exact where the context runs at 24 kHz already. */
  resample(samples) {
    const step = sampleRate / RATE;
    for (; this.position < samples.length; this.position += step) {
      const at = Math.floor(this.position);
      const before = at ? samples[at - 1] : this.last;
      this.write(before + (samples[at] - before) * (this.position - at));
    }
    this.position -= samples.length;
    this.last = samples[samples.length - 1];
  }

  write(value) {
    this.block[this.filled++] = Math.max(-1, Math.min(1, value)) * 32767;
    if (this.filled < BLOCK) return;
    this.port.postMessage(this.block);
    this.block = new Int16Array(BLOCK);
    this.filled = 0;
  }
}

registerProcessor("pcm-writer", PcmWriter);
