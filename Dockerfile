# docker build -t asr-server .                            PyTorch for the CPU
# docker build -t asr-server --build-arg TORCH=pypi .     PyTorch for CUDA: 2.8 GB to download
# docker build -t asr-server --build-arg REVISION="$(git rev-parse HEAD)" .    names the commit in the image's labels
# docker run -p 8000:8000 -v asr-models:/models asr-server small
# Without a model name it serves base, which is in the image (MODELS names others). With CUDA: docker run --gpus all.
# docs/deploy.md has the flags for a read-only container, docs/operations.md what the server leaves behind.
FROM python:3.11.14-slim AS build
# cpu, cu130 and other folders of PyTorch's own index, or pypi.
ARG TORCH=cpu
WORKDIR /src
# The dependencies are a layer of their own, which a change of the server's code leaves as it is. Each file has to have
# its hash. For the CPU, PyTorch comes from its own index, which is asked for nothing else.
COPY constraints.txt ./
COPY image image
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ONLY_BINARY=:all:
# A build after a change of the locks fetches what is new.
RUN --mount=type=cache,target=/root/.cache/pip \
    python -m venv /opt/asr-server \
 && if [ "$TORCH" = pypi ]; then set -- --requirement image/torch.txt; fi \
 && /opt/asr-server/bin/pip install --require-hashes --requirement image/requirements.txt "$@" \
 && if [ "$TORCH" != pypi ]; then \
      python -m venv /opt/uv \
   && /opt/uv/bin/pip install --require-hashes --requirement image/uv.txt \
   && /opt/uv/bin/uv pip install --python /opt/asr-server/bin/python --constraint constraints.txt --torch-backend "$TORCH" torch; \
    fi
COPY pyproject.toml README.md LICENSE ./
COPY asr_server asr_server
RUN --mount=type=cache,target=/root/.cache/pip \
    PIP_ONLY_BINARY=:none: /opt/asr-server/bin/pip install --no-deps --no-build-isolation --target /opt/server .
ARG MODELS=base
# The server's user may add models, and cannot change those of the image: mode 1777, as of /tmp.
RUN mkdir -p /opt/models/hub /opt/models/asr-server/models /opt/models/asr-server/readings \
 && for model in $MODELS; do HF_HOME=/opt/models PYTHONPATH=/opt/server /opt/asr-server/bin/python -m asr_server models fetch "$model" || exit 1; done \
 && rm -rf /opt/models/hub/.locks && find /opt/models -name '*.lock' -delete \
 && chmod 1777 /opt/models /opt/models/* /opt/models/asr-server/*

FROM python:3.11.14-slim
ARG TORCH=cpu
# With CUDA, Triton compiles its launcher when a kernel first runs.
RUN if [ "$TORCH" != cpu ]; then \
      apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*; \
    fi
# av's wheels contain x264 and x265, soxr's wheels libsoxr.
LABEL org.opencontainers.image.title=asr-server \
      org.opencontainers.image.version=1.0.0 \
      org.opencontainers.image.licenses="Apache-2.0 AND GPL-2.0-or-later AND LGPL-2.1-or-later"
COPY --from=build /opt/asr-server /opt/asr-server
COPY --from=build /opt/server /opt/server
# Models are kept in /models: give it a volume, so that those that are not in the image are fetched once.
COPY --from=build /opt/models /models
VOLUME /models
# For jobs, with a volume and --jobs-dir /jobs.
RUN install --directory --owner 10001 --group 10001 --mode 700 /jobs
ENV PATH=/opt/server/bin:/opt/asr-server/bin:$PATH PYTHONPATH=/opt/server PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    HF_HOME=/models HOME=/tmp ASR_SERVER_HOST=0.0.0.0
USER 10001:10001
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s CMD ["asr-server", "health"]
ENTRYPOINT ["asr-server", "serve"]
ARG REVISION=unknown
LABEL org.opencontainers.image.revision=$REVISION
