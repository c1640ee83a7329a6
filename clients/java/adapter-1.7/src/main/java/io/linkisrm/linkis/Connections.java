package io.linkisrm.linkis;

import io.grpc.Status;
import io.linkisrm.client.LinkisRmClient;
import io.linkisrm.client.ServiceException;
import java.io.IOException;
import java.util.Arrays;
import java.util.List;
import javax.net.ssl.SSLException;

/** Checks of the service at the start: it answers, accepts the token, and counts by Linkis's labels. */
final class Connections {
    private Connections() {}

    /** @throws SettingException with the line to change, if the manager cannot use the service */
    static Service open(Settings settings) {
        Service service = look(settings);
        try {
            for (List<String> labels : Arrays.asList(Caps.LABELS, Caps.LABELS_IN_QUEUE, Caps.LABELS_IN_NAMESPACE)) {
                if (!service.counts(labels)) {
                    count(service, labels);
                }
            }
            return service;
        } catch (ServiceException e) {
            service.client().close();
            throw told(settings, e);
        }
    }

    /** With a token that may not set limits, requests start the counting by their caps. */
    private static void count(Service service, List<String> labels) {
        try {
            service.count(labels);
        } catch (ServiceException e) {
            if (e.code() != Status.Code.PERMISSION_DENIED) {
                throw e;
            }
        }
    }

    /**
     * Checks the service without changing it.
     *
     * @throws SettingException with the line to change, if the service does not answer
     */
    static Service look(Settings settings) {
        Service service;
        try {
            service = new Service(new LinkisRmClient(settings.client));
        } catch (IOException e) {
            throw new SettingException(Settings.TOKEN_FILE, "a file for the connection cannot be used: " + e.getMessage(), e);
        }
        try {
            service.info();
            return service;
        } catch (ServiceException e) {
            service.client().close();
            throw told(settings, e);
        }
    }

    private static SettingException told(Settings settings, ServiceException error) {
        if (error.code() == Status.Code.UNAUTHENTICATED) {
            return new SettingException(Settings.TOKEN_FILE, "the service at " + settings.address + " does not accept the token ("
                    + error.reason() + "). Put a valid token into the file, and set the line "
                    + Settings.line(Settings.TOKEN_FILE, "FILE"), error);
        } else if (error.code() == Status.Code.PERMISSION_DENIED) {
            return new SettingException(Settings.TOKEN_FILE, "the token lacks permissions of a manager of Linkis: "
                    + error.getMessage() + ". Put a token with the roles manager, ecm (for the application of the ECMs) and operator into the file", error);
        }
        for (Throwable cause = error; cause != null; cause = cause.getCause()) {
            if (cause instanceof SSLException) {
                return new SettingException(Settings.CA_FILE, "the certificate of " + settings.address + " is not believed: "
                        + cause.getMessage() + ". Have the line " + Settings.line(Settings.CA_FILE, "FILE") + " name whose are", error);
            }
        }
        return new SettingException(Settings.ADDRESS, settings.address + " does not reply as linkis-rm does: " + error.getMessage()
                + ". Start it, or change the line to " + Settings.line(Settings.ADDRESS, "HOST:50051"), error);
    }
}
