# The server alone: it is told a PostgreSQL by DATABASE_URL.
FROM rust:1.95-bookworm AS build
WORKDIR /src
COPY . .
RUN cargo build --release --locked --bin linkis-rm

FROM debian:bookworm-slim
COPY --from=build /src/target/release/linkis-rm /usr/local/bin/linkis-rm
USER nobody
EXPOSE 50051
ENTRYPOINT ["linkis-rm"]
