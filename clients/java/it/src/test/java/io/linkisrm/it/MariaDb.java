package io.linkisrm.it;

import com.alibaba.druid.pool.DruidDataSource;
import java.io.BufferedReader;
import java.io.File;
import java.io.FileInputStream;
import java.io.IOException;
import java.io.InputStream;
import java.io.InputStreamReader;
import java.net.ServerSocket;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.sql.Connection;
import java.sql.DriverManager;
import java.sql.SQLException;
import java.sql.Statement;
import java.util.regex.Pattern;
import java.util.zip.GZIPInputStream;
import javax.sql.DataSource;

/** A MariaDB for all tests, with Linkis's schema in any number of databases. */
public final class MariaDb {
    private static final int READY_SECONDS = 60;
    private static final Pattern ITS_OWN = Pattern.compile("CREATE TABLE[^(]*(linkis_cg_|linkis_ps_common_lock)", Pattern.CASE_INSENSITIVE);

    private static MariaDb running;

    private final Process process;
    private final int port;
    private final Path data;

    private MariaDb(Process process, int port, Path data) {
        this.process = process;
        this.port = port;
        this.data = data;
    }

    /** The running server: started at the first use by the program in MARIADBD, and ended with the tests. */
    public static synchronized MariaDb get() throws Exception {
        if (running == null) {
            running = start();
            Runtime.getRuntime().addShutdownHook(new Thread(running::end));
        }
        return running;
    }

    private static MariaDb start() throws Exception {
        File program = new File(Environment.needed("MARIADBD"));
        Path data = Environment.databaseFolder("linkis-rm-mariadb");
        int port;
        try (ServerSocket socket = new ServerSocket(0)) {
            port = socket.getLocalPort();
        }
        File root = program.getParentFile().getParentFile().getParentFile();
        ProcessBuilder builder = new ProcessBuilder(program.getPath(), "--no-defaults", "--datadir=" + data.resolve("data"),
                "--socket=" + data.resolve("socket"), "--pid-file=" + data.resolve("pid"), "--port=" + port, "--bind-address=127.0.0.1",
                "--skip-grant-tables", "--user=" + System.getProperty("user.name"), "--innodb-flush-log-at-trx-commit=0",
                "--innodb-flush-method=nosync", "--innodb-doublewrite=0",
                "--max-connections=500", "--lc-messages-dir=" + root + "/usr/share/mysql",
                "--character-sets-dir=" + root + "/usr/share/mysql/charsets")
                .redirectErrorStream(true).redirectOutput(data.resolve("log").toFile());
        Files.createDirectory(data.resolve("data"));
        builder.environment().put("LD_LIBRARY_PATH", root + "/usr/lib/x86_64-linux-gnu");
        MariaDb database = new MariaDb(builder.start(), port, data);
        long end = System.nanoTime() + READY_SECONDS * 1_000_000_000L;
        while (true) {
            try (Connection connection = DriverManager.getConnection(database.url(""), "root", "")) {
                return database;
            } catch (SQLException e) {
                if (System.nanoTime() > end || !database.process.isAlive()) {
                    throw new IllegalStateException("MariaDB does not start: " + Files.readString(data.resolve("log")), e);
                }
                Thread.sleep(50);
            }
        }
    }

    /** Creates a database with the empty tables of Linkis's manager. */
    public void create(String name) throws Exception {
        String schema = schema(new File(Environment.needed("LINKIS_DDL")));
        try (Connection connection = DriverManager.getConnection(url(""), "root", ""); Statement statement = connection.createStatement()) {
            statement.execute("CREATE DATABASE " + name);
        }
        try (Connection connection = DriverManager.getConnection(url(name), "root", ""); Statement statement = connection.createStatement()) {
            for (String one : schema.split(";\\s*\n")) {
                if (ITS_OWN.matcher(one).find()) {
                    statement.execute(one);
                }
            }
        }
    }

    String url(String name) {
        return "jdbc:mariadb://127.0.0.1:" + port + "/" + name;
    }

    public DataSource source(String name) {
        DruidDataSource source = new DruidDataSource();
        source.setUrl(url(name));
        source.setUsername("root");
        source.setPassword("");
        source.setMaxActive(60);
        // As in Linkis: without it, a caller of a closing pool may wait forever.
        source.setMaxWait(6000);
        source.setTestWhileIdle(false);
        return source;
    }

    private void end() {
        try {
            // The server has no data to save.
            process.destroyForcibly().waitFor();
            try (var files = Files.walk(data)) {
                files.sorted(java.util.Comparator.reverseOrder()).forEach(file -> file.toFile().delete());
            }
        } catch (IOException | InterruptedException e) {
            System.err.println(data + " stays behind: " + e);
        }
    }

    private static String schema(File file) throws IOException {
        StringBuilder text = new StringBuilder();
        try (InputStream raw = new FileInputStream(file);
                BufferedReader lines = new BufferedReader(new InputStreamReader(
                        file.getName().endsWith(".gz") ? new GZIPInputStream(raw) : raw, StandardCharsets.UTF_8))) {
            for (String line = lines.readLine(); line != null; line = lines.readLine()) {
                if (!line.startsWith("--")) {
                    text.append(line.stripTrailing()).append('\n');
                }
            }
        }
        return text.toString();
    }
}
