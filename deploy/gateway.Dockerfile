# The gateway: gRPC in front, ZeroMQ behind, no torch. Build from the root of the repository:
#   docker build -f deploy/gateway.Dockerfile -t octavo-gateway .
# What is installed is locked with hashes (docs/supply-chain.md).
FROM python:3.12-slim@sha256:78387bc3881b8273120a12ebe6c1ab22b018ccc2c9adf565ae1ac9b536e184ea AS build
WORKDIR /src
RUN python -m venv /opt/octavo
COPY deploy/locks deploy/locks
RUN /opt/octavo/bin/pip install --no-cache-dir --require-hashes --no-deps --only-binary :all: \
    -r deploy/locks/gateway.txt
COPY pyproject.toml setup.py MANIFEST.in README.md LICENSE ./
COPY blockmgr blockmgr
COPY cli cli
COPY gateway gateway
COPY grammar grammar
COPY model model
COPY proto proto
COPY wire wire
COPY worker worker
RUN /opt/octavo/bin/pip install --no-cache-dir --no-deps --no-build-isolation ./proto .

FROM python:3.12-slim@sha256:78387bc3881b8273120a12ebe6c1ab22b018ccc2c9adf565ae1ac9b536e184ea
RUN groupadd --gid 10001 octavo \
 && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin octavo \
 && install -d -m 0700 -o octavo -g octavo /run/octavo
COPY --from=build /opt/octavo /opt/octavo
ENV PATH=/opt/octavo/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    OCTAVO_RUN_DIR=/run/octavo \
    OCTAVO_LOG_FORMAT=json
USER octavo
EXPOSE 50051 9090
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=10s CMD ["octavo", "health", "--live"]
ENTRYPOINT ["octavo"]
CMD ["gateway"]
