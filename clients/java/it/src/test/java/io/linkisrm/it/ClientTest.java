package io.linkisrm.it;

import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.linkisrm.client.ClientSettings;
import io.linkisrm.client.LinkisRmClient;
import io.linkisrm.client.ServiceException;
import java.time.Duration;
import java.util.concurrent.atomic.AtomicReference;
import linkis.rm.v1.FollowActionsRequest;
import linkis.rm.v1.GetServerInfoRequest;
import linkis.rm.v1.UsageServiceGrpc;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;

/** A closed client. */
class ClientTest {
    private static final ClientSettings NOBODY = ClientSettings.at("127.0.0.1:1").timeout(Duration.ofMinutes(5));

    @Test
    @Timeout(30)
    void who_calls_on_a_client_that_is_closed_is_told_at_once() throws Exception {
        LinkisRmClient client = new LinkisRmClient(NOBODY);
        client.close();
        isClosed(assertThrows(ServiceException.class, () -> info(client)));
        isClosed(assertThrows(ServiceException.class,
                () -> client.follow(UsageServiceGrpc.getFollowActionsMethod(), FollowActionsRequest.getDefaultInstance())));
    }

    @Test
    @Timeout(30)
    void a_call_that_is_being_repeated_ends_when_its_client_is_closed() throws Exception {
        LinkisRmClient client = new LinkisRmClient(NOBODY);
        AtomicReference<ServiceException> told = new AtomicReference<>();
        Thread caller = new Thread(() -> told.set(assertThrows(ServiceException.class, () -> info(client))));
        caller.start();
        // The call is in progress, or waits for its next attempt.
        while (caller.getState() != Thread.State.TIMED_WAITING && caller.getState() != Thread.State.WAITING) {
            Thread.sleep(1);
        }
        client.close();
        caller.join();
        isClosed(told.get());
    }

    private static void info(LinkisRmClient client) {
        client.call(UsageServiceGrpc.getGetServerInfoMethod(), GetServerInfoRequest.getDefaultInstance());
    }

    private static void isClosed(ServiceException error) {
        assertTrue(error.isUnavailable() && error.getMessage().contains("this client is closed"), error.toString());
    }
}
