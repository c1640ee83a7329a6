package io.linkisrm.it;

import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;

/** What the tests are told by whoever starts them: the script {@code clients/java/run}. */
final class Environment {
    /** More than all databases of a run take together. */
    private static final long DATABASE_BYTES = 4L << 30;

    private Environment() {}

    static String needed(String name) {
        String value = System.getenv(name);
        if (value == null || value.isEmpty()) {
            throw new IllegalStateException(name + " is not set: start the tests with clients/java/run");
        }
        return value;
    }

    /** A folder for a database, in memory where that has room: none of them has to outlive the machine, and a disk takes its time. */
    static Path databaseFolder(String name) throws IOException {
        Path memory = Path.of("/dev/shm");
        boolean fits = Files.isWritable(memory) && memory.toFile().getUsableSpace() > DATABASE_BYTES;
        return fits ? Files.createTempDirectory(memory, name) : Files.createTempDirectory(name);
    }
}
