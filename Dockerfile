# docker build -t asr-server .                            PyTorch for the CPU
# docker build -t asr-server --build-arg TORCH=pypi .     PyTorch for CUDA: 2.8 GB to download
# docker run -p 8000:8000 -v asr-models:/models asr-server small
# Without a model name it serves base, which is in the image (MODELS names others). With CUDA: docker run --gpus all.
# docs/operations.md has the flags for a read-only container, and the licences of what is in the image.
FROM python:3.11-slim AS build
# As in tools/install.sh: cpu, cu130 and other backends of uv, or pypi.
ARG TORCH=cpu
WORKDIR /src
# The dependencies are a layer of their own, which a change of the server's code leaves as it is.
COPY pyproject.toml constraints.txt ./
RUN python -m venv /opt/asr-server && python -m venv /opt/uv && /opt/uv/bin/pip install --no-cache-dir --constraint constraints.txt uv
RUN if [ "$TORCH" != pypi ]; then export UV_TORCH_BACKEND="$TORCH"; fi \
 && /opt/uv/bin/uv pip install --no-cache --system-certs --python /opt/asr-server --constraint constraints.txt --requirement pyproject.toml
COPY README.md LICENSE ./
COPY asr_server asr_server
RUN /opt/asr-server/bin/pip install --no-cache-dir --no-deps --target /opt/server .
ARG MODELS=base
RUN mkdir /opt/models \
 && for model in $MODELS; do HF_HOME=/opt/models PYTHONPATH=/opt/server /opt/asr-server/bin/python -m asr_server models fetch $model || exit 1; done

FROM python:3.11-slim
# av's wheels contain x264 and x265, soxr's wheels libsoxr.
LABEL org.opencontainers.image.licenses="Apache-2.0 AND GPL-2.0-or-later AND LGPL-2.1-or-later"
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
