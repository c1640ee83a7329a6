package io.linkisrm.linkis;

import io.linkisrm.client.ClientSettings;
import java.io.File;
import java.time.Duration;
import java.util.function.Function;
import org.springframework.boot.convert.DurationStyle;
import org.springframework.core.env.Environment;

/** The adapter's settings in linkis-cg-linkismanager.properties. */
final class Settings {
    /** Prefix that Linkis removes from names before it passes them to Spring. */
    static final String PREFIX = "spring.";
    static final String ENABLED = "linkis.rm.enabled";
    static final String ADDRESS = "linkis.rm.address";
    static final String TOKEN_FILE = "linkis.rm.token-file";
    static final String CA_FILE = "linkis.rm.ca-file";
    static final String CERT_FILE = "linkis.rm.cert-file";
    static final String KEY_FILE = "linkis.rm.key-file";
    static final String TIMEOUT = "linkis.rm.timeout";
    static final String WAIT = "linkis.rm.wait";

    private static final Duration TIMEOUT_DEFAULT = Duration.ofSeconds(20);

    /** Connection settings of the service. */
    final ClientSettings client;
    /** Its address, as written in the file. */
    final String address;
    /** Maximum wait of a request for capacity, unless the request has a lower one; zero for no wait. */
    final Duration wait;

    private Settings(ClientSettings client, String address, Duration wait) {
        this.client = client;
        this.address = address;
        this.wait = wait;
    }

    /** @throws SettingException if a setting is missing or invalid */
    static Settings of(Environment environment) {
        return of(key -> environment.getProperty(key));
    }

    /** @throws SettingException if a setting is missing or invalid */
    static Settings of(Function<String, String> values) {
        String address = values.apply(ADDRESS);
        if (address == null || address.trim().isEmpty()) {
            throw new SettingException(ADDRESS, "it is missing. Add the line " + line(ADDRESS, "HOST:50051"));
        }
        ClientSettings client;
        try {
            client = ClientSettings.at(address);
        } catch (IllegalArgumentException e) {
            throw new SettingException(ADDRESS, e.getMessage() + ". Change the line to " + line(ADDRESS, "HOST:50051"), e);
        }
        client.token(file(values, TOKEN_FILE)).authorities(file(values, CA_FILE)).timeout(duration(values, TIMEOUT, TIMEOUT_DEFAULT));
        File certificate = file(values, CERT_FILE);
        File key = file(values, KEY_FILE);
        if ((certificate == null) != (key == null)) {
            String missing = certificate == null ? CERT_FILE : KEY_FILE;
            throw new SettingException(missing, "a certificate needs its key, and a key its certificate. Add the line " + line(missing, "FILE"));
        }
        client.identity(certificate, key);
        return new Settings(client, address.trim(), duration(values, WAIT, Duration.ZERO));
    }

    /** A line of the configuration. */
    static String line(String key, String value) {
        return PREFIX + key + "=" + value;
    }

    private static File file(Function<String, String> values, String key) {
        String path = values.apply(key);
        if (path == null || path.trim().isEmpty()) {
            return null;
        }
        File file = new File(path.trim());
        if (!file.canRead()) {
            throw new SettingException(key, file + " cannot be read. Make it readable to the account of Linkis, or change the line");
        }
        return file;
    }

    private static Duration duration(Function<String, String> values, String key, Duration otherwise) {
        String text = values.apply(key);
        if (text == null || text.trim().isEmpty()) {
            return otherwise;
        }
        try {
            Duration duration = DurationStyle.detectAndParse(text.trim());
            if (!duration.isNegative()) {
                return duration;
            }
        } catch (IllegalArgumentException e) {
            throw new SettingException(key, "\"" + text + "\" is not a duration. Change the line to " + line(key, "20s"), e);
        }
        throw new SettingException(key, "\"" + text + "\" is negative. Change the line to " + line(key, "20s"));
    }
}
