package io.linkisrm.it;

import java.io.IOException;
import java.io.InputStream;
import java.io.OutputStream;
import java.net.InetAddress;
import java.net.ServerSocket;
import java.net.Socket;
import java.util.Set;
import java.util.concurrent.ConcurrentHashMap;

/** A proxy between a manager and a server that forwards requests, and drops replies while it is deaf. */
final class DeafProxy implements AutoCloseable {
    private final ServerSocket listener = new ServerSocket(0, 50, InetAddress.getLoopbackAddress());
    private final Set<Socket> sockets = ConcurrentHashMap.newKeySet();
    private final String host;
    private final int port;
    private volatile boolean deaf;

    DeafProxy(String server) throws IOException {
        int colon = server.lastIndexOf(':');
        host = server.substring(server.lastIndexOf('/') + 1, colon);
        port = Integer.parseInt(server.substring(colon + 1));
        start(() -> {
            while (true) {
                Socket client = listener.accept();
                Socket to = new Socket(host, port);
                sockets.add(client);
                sockets.add(to);
                start(() -> handOn(client, to, false));
                start(() -> handOn(to, client, true));
            }
        });
    }

    String address() {
        return "127.0.0.1:" + listener.getLocalPort();
    }

    void deafen() {
        deaf = true;
    }

    /** Forwards replies again, over new connections: in the old ones, some are missing. */
    void hear() throws IOException {
        deaf = false;
        closeAll();
    }

    @Override
    public void close() throws IOException {
        listener.close();
        closeAll();
    }

    private void closeAll() throws IOException {
        for (Socket socket : sockets) {
            socket.close();
        }
    }

    private void handOn(Socket from, Socket to, boolean answers) throws IOException {
        byte[] bytes = new byte[16384];
        try (from; to) {
            InputStream in = from.getInputStream();
            OutputStream out = to.getOutputStream();
            for (int read = in.read(bytes); read >= 0; read = in.read(bytes)) {
                if (!(answers && deaf)) {
                    out.write(bytes, 0, read);
                }
            }
        }
    }

    private interface Work {
        void run() throws IOException;
    }

    private static void start(Work work) {
        Thread thread = new Thread(() -> {
            try {
                work.run();
            } catch (IOException e) {
                // One of the two has closed.
            }
        }, "deaf-proxy");
        thread.setDaemon(true);
        thread.start();
    }
}
