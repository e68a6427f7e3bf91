# OpenAI's HTTP interface in front of a gateway (docs/interop.md): somebody else's gateway, from PyPI.
#   docker build -f deploy/smg.Dockerfile -t octavo-smg .
FROM python:3.12-slim
RUN groupadd --gid 10001 octavo \
 && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin octavo \
 && pip install --no-cache-dir smg==1.13.0 smg-grpc-proto==0.4.28
USER octavo
EXPOSE 8080
ENTRYPOINT ["python", "-m", "smg", "launch"]
