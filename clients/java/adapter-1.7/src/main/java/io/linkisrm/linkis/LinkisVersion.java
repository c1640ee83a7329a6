package io.linkisrm.linkis;

import java.security.CodeSource;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import org.apache.linkis.common.ServiceInstance;

/** Version of the running Linkis. */
final class LinkisVersion {
    private static final Pattern IN_JAR_NAME = Pattern.compile("-(\\d+\\.\\d+)\\.\\d+[^/]*\\.jar");
    /** Versions with the resource manager that this adapter replaces. */
    private static final Pattern KNOWN = Pattern.compile("1\\.[78]");

    private LinkisVersion() {}

    /** @throws SettingException if the adapter does not support this Linkis */
    static void check() {
        check(of(ServiceInstance.class));
    }

    /** The check for a version, as {@link #ofJar} returns it. */
    static void check(String version) {
        if (!KNOWN.matcher(version).matches()) {
            throw new SettingException(Settings.ENABLED, "this is Linkis " + (version.isEmpty() ? "of an unknown version" : version)
                    + ", and the adapter is for 1.7 and 1.8. Take the jar out of LINKIS_EXTENDED_LIB, or set "
                    + Settings.line(Settings.ENABLED, "false"));
        }
    }

    /** Version in the name of the jar of a class; empty without one. */
    static String of(Class<?> linkis) {
        CodeSource source = linkis.getProtectionDomain().getCodeSource();
        return source == null || source.getLocation() == null ? "" : ofJar(source.getLocation().getPath());
    }

    /** First two numbers of the version in the name of a jar; empty without them. */
    static String ofJar(String path) {
        Matcher matcher = IN_JAR_NAME.matcher(path);
        return matcher.find() ? matcher.group(1) : "";
    }
}
