# A worker: the model on a GPU, or on the CPU. Build from the root of the repository:
#   docker build -f deploy/worker.Dockerfile -t octavo-worker .
# PIP_EXTRA_INDEX_URL adds a package index, for example one with CPU-only wheels of torch, which are much smaller.
FROM python:3.12-slim AS build
ARG TORCH=torch==2.13.0
ARG PIP_EXTRA_INDEX_URL=
WORKDIR /src
RUN python -m venv /opt/octavo
RUN /opt/octavo/bin/pip install --no-cache-dir "$TORCH"
COPY pyproject.toml README.md LICENSE ./
COPY deploy/requirements.py deploy/requirements.py
RUN python deploy/requirements.py > /tmp/requirements.txt \
 && /opt/octavo/bin/pip install --no-cache-dir -r /tmp/requirements.txt
COPY blockmgr blockmgr
COPY cli cli
COPY gateway gateway
COPY grammar grammar
COPY model model
COPY proto proto
COPY wire wire
COPY worker worker
RUN /opt/octavo/bin/pip install --no-cache-dir --no-deps .

FROM python:3.12-slim
# Triton compiles its launchers with a C compiler.
RUN apt-get update \
 && apt-get install -y --no-install-recommends gcc libc6-dev \
 && rm -rf /var/lib/apt/lists/*
RUN groupadd --gid 10001 octavo \
 && useradd --uid 10001 --gid 10001 --create-home --shell /usr/sbin/nologin octavo \
 && install -d -m 0700 -o octavo -g octavo /run/octavo /home/octavo/.cache /home/octavo/.cache/huggingface
COPY --from=build /opt/octavo /opt/octavo
ENV PATH=/opt/octavo/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    HF_HOME=/home/octavo/.cache/huggingface \
    OCTAVO_RUN_DIR=/run/octavo \
    OCTAVO_LOG_FORMAT=json
USER octavo
EXPOSE 9091
STOPSIGNAL SIGTERM
ENTRYPOINT ["octavo"]
CMD ["worker"]
