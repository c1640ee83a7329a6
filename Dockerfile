# The server without a PostgreSQL; DATABASE_URL or DATABASE_URL_FILE names its PostgreSQL.
FROM rust:1.95-bookworm AS build
WORKDIR /src
COPY . .
# The revision in the first line of the log: --build-arg REVISION=$(git rev-parse --short=12 HEAD)
ARG REVISION=""
RUN cargo build --release --locked --bin linkis-rm

FROM debian:bookworm-slim
COPY --from=build /src/target/release/linkis-rm /usr/local/bin/linkis-rm
# A number, so that Kubernetes can verify that it is not root. The process needs no writable folder.
USER 65532:65532
EXPOSE 50051 51051
# Liveness: an instance without its database must not be restarted. If it listens elsewhere or uses TLS, set LINKIS_RM_ADDRESS, and
# LINKIS_RM_CA_CERT for its certificate.
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s CMD ["linkis-rm", "health", "--service", "liveness"]
ENTRYPOINT ["linkis-rm"]
