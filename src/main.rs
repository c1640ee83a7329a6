//! The `linkis-rm` program. Its code is a library, which compiles while its dependencies are still compiled.

use std::process::ExitCode;

/// mimalloc, because a call makes some dozens of small allocations on one thread, and another thread frees as many.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    linkis_rm::main()
}
