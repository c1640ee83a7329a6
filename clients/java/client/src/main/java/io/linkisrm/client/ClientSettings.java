package io.linkisrm.client;

import java.io.File;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Collections;
import java.util.List;

/** Addresses and connection settings of the service. */
public final class ClientSettings {
    private final List<String> addresses;
    private final boolean tls;
    private File authorities;
    private File certificate;
    private File key;
    private File token;
    private Duration timeout = Duration.ofSeconds(10);

    private ClientSettings(List<String> addresses, boolean tls) {
        this.addresses = Collections.unmodifiableList(addresses);
        this.tls = tls;
    }

    /**
     * Settings for these addresses: {@code host:port}, or several with commas between them; {@code https://} before them for TLS.
     *
     * @throws IllegalArgumentException if an address is invalid, or only some have TLS
     */
    public static ClientSettings at(String addresses) {
        List<String> bare = new ArrayList<>();
        int secured = 0;
        for (String address : addresses.split(",")) {
            String one = address.trim();
            if (one.startsWith("https://")) {
                secured++;
            }
            one = one.replaceFirst("^https?://", "").replaceFirst("/$", "");
            if (!one.matches("[^\\s:/]+:[0-9]{1,5}|\\[[0-9a-fA-F:.]+]:[0-9]{1,5}")) {
                throw new IllegalArgumentException("\"" + address.trim() + "\" is not host:port or https://host:port");
            }
            bare.add(one);
        }
        if (secured != 0 && secured != bare.size()) {
            throw new IllegalArgumentException("all addresses must begin with https://, or none: \"" + addresses + "\"");
        }
        return new ClientSettings(bare, secured > 0);
    }

    /** Trusted certificates, as PEM; by default those of Java. */
    public ClientSettings authorities(File file) {
        authorities = file;
        return this;
    }

    /** The client's certificate and its key, as PEM. */
    public ClientSettings identity(File certificateFile, File keyFile) {
        certificate = certificateFile;
        key = keyFile;
        return this;
    }

    /** The file whose first line is sent as {@code authorization: Bearer}; it is read again when it changes. */
    public ClientSettings token(File file) {
        token = file;
        return this;
    }

    /** Timeout of a call, with all its attempts. */
    public ClientSettings timeout(Duration duration) {
        timeout = duration;
        return this;
    }

    List<String> addresses() {
        return addresses;
    }

    boolean tls() {
        return tls;
    }

    File authorities() {
        return authorities;
    }

    File certificate() {
        return certificate;
    }

    File key() {
        return key;
    }

    File token() {
        return token;
    }

    /** Timeout of a call, with all its attempts. */
    public Duration timeout() {
        return timeout;
    }
}
