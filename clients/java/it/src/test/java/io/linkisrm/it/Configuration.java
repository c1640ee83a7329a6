package io.linkisrm.it;

import com.google.common.cache.LoadingCache;
import java.lang.reflect.Method;
import java.util.HashMap;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import java.util.function.UnaryOperator;
import org.apache.linkis.common.ServiceInstance;
import org.apache.linkis.governance.common.protocol.conf.RequestQueryEngineConfigWithGlobalConfig;
import org.apache.linkis.governance.common.protocol.conf.ResponseQueryConfig;
import org.apache.linkis.rpc.Sender;
import org.apache.linkis.rpc.Sender$;
import scala.concurrent.duration.Duration;

/** Replaces Linkis's configuration service: each test configures its own users. */
final class Configuration extends Sender {
    private static final Configuration INSTANCE = new Configuration();
    private final Map<String, Map<String, String>> values = new ConcurrentHashMap<>();
    private volatile UnaryOperator<Object> service = this::configured;

    /** Removes all configuration, so that Linkis's defaults apply, except for users of {@link #set}. */
    @SuppressWarnings("unchecked")
    static void use() throws ReflectiveOperationException {
        Method cache = Sender$.class.getDeclaredMethod("serviceInstanceToSenders");
        cache.setAccessible(true);
        for (String name : new String[] {"linkis-ps-publicservice", "linkis-ps-configuration"}) {
            ServiceInstance instance = new ServiceInstance();
            instance.setApplicationName(name);
            ((LoadingCache<ServiceInstance, Sender>) cache.invoke(Sender$.MODULE$)).put(instance, INSTANCE);
        }
    }

    /** Sets the configuration of all users with this prefix. */
    static void set(String users, String... keysAndValues) throws ReflectiveOperationException {
        Map<String, String> own = new HashMap<>();
        for (int i = 0; i < keysAndValues.length; i += 2) {
            own.put(keysAndValues[i], keysAndValues[i + 1]);
        }
        INSTANCE.values.put(users, own);
        use();
    }

    /** Sets the reply of the manager's sender. */
    static void answer(UnaryOperator<Object> service) throws ReflectiveOperationException {
        INSTANCE.service = service;
        use();
    }

    /** Restores the replies of {@link #set}. */
    static void answerAsSet() throws ReflectiveOperationException {
        answer(INSTANCE::configured);
    }

    @Override
    public Object ask(Object message) {
        return service.apply(message);
    }

    private Object configured(Object message) {
        String user = ((RequestQueryEngineConfigWithGlobalConfig) message).userCreatorLabel().getUser();
        ResponseQueryConfig answer = new ResponseQueryConfig();
        answer.setKeyAndValue(new HashMap<>());
        values.forEach((users, own) -> {
            if (user.startsWith(users)) {
                answer.getKeyAndValue().putAll(own);
            }
        });
        return answer;
    }

    @Override
    public Object ask(Object message, Duration timeout) {
        return ask(message);
    }

    @Override
    public void send(Object message) {
        throw new UnsupportedOperationException("nothing is sent to the configuration service");
    }

    @Override
    public void deliver(Object message) {
        throw new UnsupportedOperationException("nothing is sent to the configuration service");
    }
}
