package io.linkisrm.linkis;

import org.springframework.boot.autoconfigure.condition.ConditionalOnClass;
import org.springframework.boot.autoconfigure.condition.ConditionalOnProperty;
import org.springframework.context.annotation.Bean;
import org.springframework.context.annotation.Configuration;

/**
 * Puts the adapter into Linkis's manager. The jar may be on the class path of all of Linkis's services: those without a resource manager
 * are left alone, and so is one that says {@code spring.linkis.rm.enabled=false}.
 */
@Configuration(proxyBeanMethods = false)
@ConditionalOnClass(name = Installer.BUILT_IN_CLASS)
@ConditionalOnProperty(name = Settings.ENABLED, havingValue = "true", matchIfMissing = true)
public class AdapterConfiguration {
    /** Static, so that it is there before other beans are. */
    @Bean
    public static Installer linkisRmInstaller() {
        return new Installer();
    }
}
