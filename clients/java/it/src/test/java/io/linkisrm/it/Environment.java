package io.linkisrm.it;

import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;

/** Environment variables that the script {@code clients/java/run} sets. */
final class Environment {
    /** Above the size of all databases of a run. */
    private static final long DATABASE_BYTES = 4L << 30;

    private Environment() {}

    static String needed(String name) {
        String value = System.getenv(name);
        if (value == null || value.isEmpty()) {
            throw new IllegalStateException(name + " is not set: start the tests with clients/java/run");
        }
        return value;
    }

    /** A folder for a database, in memory if it has space: no database must survive the machine, and a disk is slow. */
    static Path databaseFolder(String name) throws IOException {
        Path memory = Path.of("/dev/shm");
        boolean fits = Files.isWritable(memory) && memory.toFile().getUsableSpace() > DATABASE_BYTES;
        return fits ? Files.createTempDirectory(memory, name) : Files.createTempDirectory(name);
    }
}
