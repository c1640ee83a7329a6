//! The service as its callers meet it: a real server on a free port, a real PostgreSQL, the real client.

mod conformance;
