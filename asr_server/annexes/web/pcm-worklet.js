// The microphone's samples as 16-bit PCM, 100 ms a message, at the rate of its context.

class PcmWriter extends AudioWorkletProcessor {
  block = new Int16Array(sampleRate / 10);
  filled = 0;
  hasEnded = false;

  constructor() {
    super();
    this.port.onmessage = () => this.end();
  }

  process([[samples]]) {
    for (const sample of (!this.hasEnded && samples) || []) this.write(sample);
    return !this.hasEnded;
  }

  /** Gives the block begun, and an empty one behind which nothing comes. */
  end() {
    this.port.postMessage(this.block.slice(0, this.filled));
    if (this.filled) this.port.postMessage(new Int16Array(0));
    this.hasEnded = true;
  }

  write(sample) {
    this.block[this.filled++] = Math.max(-1, Math.min(1, sample)) * 32767;
    if (this.filled < this.block.length) return;
    this.port.postMessage(this.block.slice());
    this.filled = 0;
  }
}

registerProcessor("pcm-writer", PcmWriter);
