package io.linkisrm.linkis;

import java.security.CodeSource;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import org.apache.linkis.common.ServiceInstance;

/** Which Linkis this is. */
final class LinkisVersion {
    private static final Pattern IN_JAR_NAME = Pattern.compile("-(\\d+\\.\\d+)\\.\\d+[^/]*\\.jar");
    /** Those whose resource manager is what this adapter was written for. */
    private static final Pattern KNOWN = Pattern.compile("1\\.[78]");

    private LinkisVersion() {}

    /** @throws SettingException if it is a Linkis that this adapter does not know */
    static void check() {
        check(of(ServiceInstance.class));
    }

    /** The same of a version, as {@link #ofJar} tells it. */
    static void check(String version) {
        if (!KNOWN.matcher(version).matches()) {
            throw new SettingException(Settings.ENABLED, "this is Linkis " + (version.isEmpty() ? "of an unknown version" : version)
                    + ", and the adapter is for 1.7 and 1.8. Take the jar out of LINKIS_EXTENDED_LIB, or set "
                    + Settings.line(Settings.ENABLED, "false"));
        }
    }

    /** By the name of the jar that a class comes from; empty if that does not tell. */
    static String of(Class<?> linkis) {
        CodeSource source = linkis.getProtectionDomain().getCodeSource();
        return source == null || source.getLocation() == null ? "" : ofJar(source.getLocation().getPath());
    }

    /** The first two numbers of the version in the name of a jar; empty if there are none. */
    static String ofJar(String path) {
        Matcher matcher = IN_JAR_NAME.matcher(path);
        return matcher.find() ? matcher.group(1) : "";
    }
}
