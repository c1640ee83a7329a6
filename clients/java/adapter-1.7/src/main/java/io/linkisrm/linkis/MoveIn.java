package io.linkisrm.linkis;

import io.linkisrm.client.ServiceException;
import java.io.FileInputStream;
import java.io.IOException;
import java.io.InputStream;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.nio.file.Path;
import java.nio.file.Paths;
import java.sql.Connection;
import java.sql.DriverManager;
import java.sql.SQLException;
import java.util.Arrays;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.UUID;
import linkis.rm.v1.AdminServiceGrpc;
import linkis.rm.v1.AdoptTicketRequest;
import linkis.rm.v1.AuditRequest;
import linkis.rm.v1.AuditResponse;
import linkis.rm.v1.Difference;
import linkis.rm.v1.EmInstance;
import linkis.rm.v1.EngineInstance;
import linkis.rm.v1.LinkisJson;
import linkis.rm.v1.RegisterRequest;
import linkis.rm.v1.Resource;
import org.apache.linkis.manager.common.entity.resource.ResourceType;
import org.apache.linkis.manager.common.utils.ResourceUtils;

/**
 * Imports Linkis's tables into the service, while Linkis's managers are stopped and engines run: its ECMs, and its live engines with their
 * tickets. It also starts the counting by the labels that Linkis limits. Without {@code --apply} it only prints its actions. It may be
 * repeated.
 *
 * <p>Exit code: 0 if everything is imported, 1 if something is omitted or differs, 2 without a reply, 64 for wrong arguments.
 */
public final class MoveIn {
    private static final String USAGE = "usage: MoveIn CONF_DIRECTORY [--apply]";
    private static final String DATABASE = "wds.linkis.server.mybatis.datasource.";
    private static final int ALL_THERE = 0;
    private static final int LEFT_OUT = 1;
    private static final int NO_ANSWER = 2;
    private static final int WRONG = 64;

    private final Service service;
    private final LinkisBooks linkis;
    private final boolean apply;
    private final PrintStream out;
    private int leftOut;

    private MoveIn(Service service, LinkisBooks linkis, boolean apply, PrintStream out) {
        this.service = service;
        this.linkis = linkis;
        this.apply = apply;
        this.out = out;
    }

    /** Entry point of the command line. */
    public static void main(String[] arguments) {
        System.exit(run(arguments, System.out, System.err));
    }

    /** Runs with other output streams; returns the exit code. */
    public static int run(String[] arguments, PrintStream out, PrintStream err) {
        List<String> said = Arrays.asList(arguments);
        boolean apply = said.contains("--apply");
        if (said.size() != (apply ? 2 : 1) || said.get(0).startsWith("-")) {
            err.println(USAGE);
            return WRONG;
        }
        Properties lines;
        Settings settings;
        try {
            lines = lines(Paths.get(said.get(0)));
            settings = Settings.of(key -> lines.getProperty(Settings.PREFIX + key));
        } catch (IOException | SettingException e) {
            err.println(e.getMessage());
            return WRONG;
        }
        try (Connection database = database(lines)) {
            Service service = apply ? Connections.open(settings) : Connections.look(settings);
            try {
                return new MoveIn(service, new LinkisBooks(database), apply, out).move();
            } finally {
                service.client().close();
            }
        } catch (SQLException e) {
            err.println("Linkis's database (" + DATABASE + "url): " + e.getMessage());
            return NO_ANSWER;
        } catch (SettingException | ServiceException e) {
            err.println(e.getMessage());
            return NO_ANSWER;
        }
    }

    private int move() throws SQLException {
        out.println(apply ? "Moving in:" : "--apply would do this:");
        out.println("  count by user, creator and engine type; and these with queue, and with namespace");
        for (LinkisBooks.Host host : linkis.hosts()) {
            register(host);
        }
        for (LinkisBooks.Engine engine : linkis.engines()) {
            adopt(engine);
        }
        if (apply) {
            audit();
        }
        if (leftOut > 0) {
            out.println(leftOut + " left out, or different: see above");
        }
        return leftOut == 0 ? ALL_THERE : LEFT_OUT;
    }

    private void register(LinkisBooks.Host host) {
        Map<String, String> labels = LabelMap.of(host.labels);
        RegisterRequest.Builder request = RegisterRequest.newBuilder().putAllLabels(labels).setTotal(resource(host.type, host.total))
                .setEm(EmInstance.newBuilder().setApplicationName(host.application).setInstance(host.instance));
        if (host.kept != null) {
            request.setProtectedResource(resource(host.type, host.kept));
        }
        out.println("  register " + host.instance + ": " + host.total + ", protected " + host.kept + ", labels " + labels);
        done(host.instance, () -> service.register(request.build()));
    }

    private void adopt(LinkisBooks.Engine engine) {
        String name = "engine " + engine.instance + " (" + engine.ticket + ")";
        String problem = problem(engine);
        if (problem != null) {
            leftOut++;
            out.println("  LEFT OUT: " + name + " " + problem);
            return;
        }
        out.println("  adopt " + name + " of " + engine.scope + " on " + engine.host + ": " + engine.used);
        AdoptTicketRequest request = AdoptTicketRequest.newBuilder().setTicketId(engine.ticket)
                .setEm(EmInstance.newBuilder().setApplicationName(engine.hostApplication).setInstance(engine.host))
                .setUser(engine.scope.user).setCreator(engine.scope.creator).setEngineType(engine.scope.engineType)
                .setEngine(EngineInstance.newBuilder().setApplicationName(engine.application).setInstance(engine.instance))
                .setUsed(resource(engine.type, engine.used)).build();
        done(name, () -> service.client().call(AdminServiceGrpc.getAdoptTicketMethod(), request));
    }

    /** The reason why an engine cannot be adopted; null if it can. */
    private static String problem(LinkisBooks.Engine engine) {
        try {
            UUID.fromString(engine.ticket);
        } catch (IllegalArgumentException e) {
            return "has a ticket that is not a UUID";
        }
        if (engine.used == null) {
            return "is not confirmed yet: wait until it is; if its manager is stopped, the engine stops when it tries to report";
        } else if (engine.host == null) {
            return "runs on an ECM that is not in Linkis's tables";
        } else if (engine.scope == null) {
            return "has no user and creator";
        }
        org.apache.linkis.manager.common.entity.resource.Resource used =
                ResourceUtils.deserializeResource(engine.used, ResourceType.valueOf(engine.type));
        boolean nothing = used == null || Amounts.dimensions(used).values().stream().allMatch(amount -> amount == 0);
        return nothing ? "uses nothing" : null;
    }

    private void audit() {
        AuditResponse books = service.client().call(AdminServiceGrpc.getAuditMethod(), AuditRequest.getDefaultInstance());
        out.println("Audit: " + books.getEms() + " hosts, " + books.getTickets() + " tickets, " + books.getDifferenceCount() + " differences");
        for (Difference difference : books.getDifferencesList()) {
            leftOut++;
            out.println("  " + difference.getWhat() + " " + difference.getCounter() + ": " + difference.getProblem());
        }
        for (String note : books.getNotesList()) {
            out.println("  " + note);
        }
    }

    private void done(String what, Runnable step) {
        if (!apply) {
            return;
        }
        try {
            step.run();
        } catch (ServiceException e) {
            if (e.isUnavailable()) {
                throw e;
            }
            leftOut++;
            out.println("  LEFT OUT: " + what + ": " + e.getMessage());
        }
    }

    private static Resource resource(String type, String json) {
        return Resource.newBuilder().setJson(LinkisJson.newBuilder().setResourceType(type).setDocument(json)).build();
    }

    /** The settings in Linkis's order: the manager's own file precedes the common file. */
    private static Properties lines(Path directory) throws IOException {
        Properties lines = new Properties();
        for (String name : new String[] {"linkis.properties", "linkis-cg-linkismanager.properties"}) {
            try (InputStream file = new FileInputStream(directory.resolve(name).toFile())) {
                lines.load(new InputStreamReader(file, StandardCharsets.UTF_8));
            }
        }
        return lines;
    }

    private static Connection database(Properties lines) throws SQLException {
        if (Boolean.parseBoolean(lines.getProperty("wds.linkis.mysql.is.encrypt"))) {
            throw new SQLException("its password is encrypted (wds.linkis.mysql.is.encrypt): give MoveIn a copy of the files with the plain one");
        }
        return DriverManager.getConnection(lines.getProperty(DATABASE + "url", ""), lines.getProperty(DATABASE + "username", ""),
                lines.getProperty(DATABASE + "password", ""));
    }
}
