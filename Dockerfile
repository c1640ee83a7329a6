# The server alone: it is told a PostgreSQL by DATABASE_URL or DATABASE_URL_FILE.
FROM rust:1.95-bookworm AS build
WORKDIR /src
COPY . .
# The revision in the first line of the log: --build-arg REVISION=$(git rev-parse --short=12 HEAD)
ARG REVISION=""
RUN cargo build --release --locked --bin linkis-rm

FROM debian:bookworm-slim
COPY --from=build /src/target/release/linkis-rm /usr/local/bin/linkis-rm
# A number, so that it can be seen from outside that it is not root. It has nothing to write to, and needs nothing.
USER 65532:65532
EXPOSE 50051 51051
# Whether it lives: an instance whose database is away has to be waited for, and not to be started anew. LINKIS_RM_ADDRESS names it if
# it listens elsewhere or encrypts, and LINKIS_RM_CA_CERT whom to trust then.
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s CMD ["linkis-rm", "health", "--service", "liveness"]
ENTRYPOINT ["linkis-rm"]
