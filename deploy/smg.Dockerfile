# OpenAI's HTTP interface in front of a gateway (docs/interop.md): a gateway of others, from PyPI.
#   docker build -f deploy/smg.Dockerfile -t octavo-smg .
# What is installed is locked with hashes (docs/supply-chain.md).
FROM python:3.12-slim@sha256:78387bc3881b8273120a12ebe6c1ab22b018ccc2c9adf565ae1ac9b536e184ea
COPY deploy/locks/smg.txt /tmp/smg.txt
RUN groupadd --gid 10001 octavo \
 && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin octavo \
 && pip install --no-cache-dir --require-hashes --no-deps --only-binary :all: -r /tmp/smg.txt
USER octavo
EXPOSE 8080
ENTRYPOINT ["python", "-m", "smg", "launch"]
