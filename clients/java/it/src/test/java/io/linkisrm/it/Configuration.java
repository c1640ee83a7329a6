package io.linkisrm.it;

import com.google.common.cache.LoadingCache;
import java.lang.reflect.Method;
import java.util.HashMap;
import java.util.Map;
import org.apache.linkis.common.ServiceInstance;
import org.apache.linkis.governance.common.protocol.conf.ResponseQueryConfig;
import org.apache.linkis.rpc.Sender;
import org.apache.linkis.rpc.Sender$;
import scala.concurrent.duration.Duration;

/** In the place of Linkis's configuration service: the same for everybody. */
final class Configuration extends Sender {
    private static final Configuration INSTANCE = new Configuration();
    private volatile Map<String, String> values = new HashMap<>();

    /** From now on this is what is configured for everybody; what is not named is as Linkis has it by default. */
    @SuppressWarnings("unchecked")
    static void set(String... keysAndValues) throws ReflectiveOperationException {
        Map<String, String> values = new HashMap<>();
        for (int i = 0; i < keysAndValues.length; i += 2) {
            values.put(keysAndValues[i], keysAndValues[i + 1]);
        }
        INSTANCE.values = values;
        Method cache = Sender$.class.getDeclaredMethod("serviceInstanceToSenders");
        cache.setAccessible(true);
        for (String name : new String[] {"linkis-ps-publicservice", "linkis-ps-configuration"}) {
            ServiceInstance instance = new ServiceInstance();
            instance.setApplicationName(name);
            ((LoadingCache<ServiceInstance, Sender>) cache.invoke(Sender$.MODULE$)).put(instance, INSTANCE);
        }
    }

    @Override
    public Object ask(Object message) {
        ResponseQueryConfig answer = new ResponseQueryConfig();
        answer.setKeyAndValue(new HashMap<>(values));
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
