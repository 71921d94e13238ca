# docker build -t asr-server .
# docker run --gpus all -p 8000:8000 asr-server --model openai/whisper-large-v3-turbo
# Without a model name it serves the embedded one. PIP_EXTRA_INDEX_URL may name PyTorch's CPU index: a far
# smaller image for machines without a GPU.
FROM python:3.11-slim AS build
ARG PIP_EXTRA_INDEX_URL=
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY asr_server asr_server
RUN python -m venv /opt/asr-server \
 && /opt/asr-server/bin/pip install --no-cache-dir --constraint constraints.txt .

FROM python:3.11-slim
COPY --from=build /opt/asr-server /opt/asr-server
RUN useradd --create-home asr
USER asr
ENV PATH=/opt/asr-server/bin:$PATH ASR_SERVER_HOST=0.0.0.0 PYTHONUNBUFFERED=1
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=3s --start-period=120s \
  CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=2)"]
ENTRYPOINT ["asr-server", "serve"]
