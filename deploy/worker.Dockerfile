# A worker: the model on a GPU, or on the CPU. Build from the root of the repository:
#   docker build -f deploy/worker.Dockerfile -t octavo-worker .
#   docker build -f deploy/worker.Dockerfile -t octavo-worker-cpu --build-arg DEVICE=cpu .
# What is installed is locked with hashes (docs/supply-chain.md), but torch's build for CPUs, whose hash TORCH_CPU_SHA256
# takes. PIP_EXTRA_INDEX_URL adds a package index, for example one that has this build.
FROM python:3.12-slim@sha256:78387bc3881b8273120a12ebe6c1ab22b018ccc2c9adf565ae1ac9b536e184ea AS build
ARG DEVICE=cuda
ARG PIP_EXTRA_INDEX_URL=
ARG TORCH_CPU_SHA256=
WORKDIR /src
RUN python -m venv /opt/octavo
COPY deploy/locks deploy/locks
RUN /opt/octavo/bin/pip install --no-cache-dir --require-hashes --no-deps --only-binary :all: \
    -r "deploy/locks/worker-$DEVICE.txt"
# torch's build for CPUs comes from PyTorch's own index, by its exact version.
COPY pyproject.toml setup.py MANIFEST.in README.md LICENSE ./
COPY deploy/install_torch.py deploy/install_torch.py
RUN python deploy/install_torch.py --python /opt/octavo/bin/python --device "$DEVICE" --sha256 "$TORCH_CPU_SHA256"
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
# Triton compiles its launchers with a C compiler, Octavo its kernels for CPUs.
RUN apt-get update \
 && apt-get install -y --no-install-recommends gcc libc6-dev \
 && rm -rf /var/lib/apt/lists/*
RUN groupadd --gid 10001 octavo \
 && useradd --uid 10001 --gid 10001 --create-home --shell /usr/sbin/nologin octavo \
 && install -d -m 0700 -o octavo -g octavo /run/octavo /home/octavo/.cache /home/octavo/.cache/huggingface /var/cache/octavo
COPY --from=build /opt/octavo /opt/octavo
# What is compiled and measured at the first start is kept in /var/cache/octavo: a volume there has to be writable, and
# mounted so that it can be executed from.
ENV PATH=/opt/octavo/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    HF_HOME=/home/octavo/.cache/huggingface \
    XDG_CACHE_HOME=/var/cache/octavo \
    TRITON_CACHE_DIR=/var/cache/octavo/triton \
    OCTAVO_RUN_DIR=/run/octavo \
    OCTAVO_LOG_FORMAT=json
USER octavo
EXPOSE 9091
STOPSIGNAL SIGTERM
# Ready is who has loaded its model and is registered at a gateway; loading may take the whole start period.
HEALTHCHECK --interval=10s --timeout=5s --start-period=600s CMD ["octavo", "health", "--worker"]
ENTRYPOINT ["octavo"]
CMD ["worker"]
