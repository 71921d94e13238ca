# docker build -t asr-server .
# docker run --gpus all -p 8000:8000 -v asr-models:/models asr-server openai/whisper-large-v3-turbo
# Without a model name it serves base, which is in the image (MODELS names others). PIP_EXTRA_INDEX_URL may name PyTorch's CPU index: a far
# smaller image for machines without a GPU. docs/operations.md has the flags for a read-only container.
FROM python:3.11-slim AS build
ARG PIP_EXTRA_INDEX_URL=
WORKDIR /src
RUN python -m venv /opt/asr-server
# The dependencies are a layer of their own, which a change of the server's code leaves as it is.
COPY pyproject.toml constraints.txt ./
RUN /opt/asr-server/bin/python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies'], sep='\n')" > requirements.txt \
 && /opt/asr-server/bin/pip install --no-cache-dir --constraint constraints.txt --requirement requirements.txt
COPY README.md LICENSE ./
COPY asr_server asr_server
RUN /opt/asr-server/bin/pip install --no-cache-dir --no-deps --target /opt/server .
ARG MODELS=base
RUN mkdir /opt/models \
 && for model in $MODELS; do HF_HOME=/opt/models PYTHONPATH=/opt/server /opt/asr-server/bin/python -m asr_server models fetch $model || exit 1; done

FROM python:3.11-slim
COPY --from=build /opt/asr-server /opt/asr-server
COPY --from=build /opt/server /opt/server
# Models are kept in /models: give it a volume, so that those that are not in the image are fetched once.
COPY --from=build --chown=10001:10001 /opt/models /models
VOLUME /models
ENV PATH=/opt/server/bin:/opt/asr-server/bin:$PATH PYTHONPATH=/opt/server PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    HF_HOME=/models HOME=/tmp ASR_SERVER_HOST=0.0.0.0
USER 10001:10001
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s CMD ["asr-server", "health"]
ENTRYPOINT ["asr-server", "serve"]
