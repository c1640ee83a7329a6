package io.linkisrm.linkis;

import org.springframework.boot.autoconfigure.condition.ConditionalOnClass;
import org.springframework.boot.autoconfigure.condition.ConditionalOnProperty;
import org.springframework.context.annotation.Bean;
import org.springframework.context.annotation.Configuration;

/**
 * Installs the adapter in Linkis's manager. The jar may be on the class path of all of Linkis's services: it has no effect in services
 * without a resource manager, and with {@code spring.linkis.rm.enabled=false}.
 */
@Configuration(proxyBeanMethods = false)
@ConditionalOnClass(name = Installer.BUILT_IN_CLASS)
@ConditionalOnProperty(name = Settings.ENABLED, havingValue = "true", matchIfMissing = true)
public class AdapterConfiguration {
    /** Static, so that it exists before other beans. */
    @Bean
    public static Installer linkisRmInstaller() {
        return new Installer();
    }
}
