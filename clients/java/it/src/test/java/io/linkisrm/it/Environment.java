package io.linkisrm.it;

/** What the tests are told by whoever starts them: the script {@code clients/java/run}. */
final class Environment {
    private Environment() {}

    static String needed(String name) {
        String value = System.getenv(name);
        if (value == null || value.isEmpty()) {
            throw new IllegalStateException(name + " is not set: start the tests with clients/java/run");
        }
        return value;
    }
}
