package io.linkisrm.linkis;

import org.springframework.beans.factory.config.BeanDefinition;
import org.springframework.beans.factory.config.ConfigurableListableBeanFactory;
import org.springframework.beans.factory.support.BeanDefinitionRegistry;
import org.springframework.beans.factory.support.BeanDefinitionRegistryPostProcessor;
import org.springframework.context.EnvironmentAware;
import org.springframework.core.env.Environment;

/**
 * Makes Spring create {@link RemoteResourceManager} in place of Linkis's own resource manager, under the same name. Both classes resolve to
 * this bean, and Linkis's own is never created.
 */
public class Installer implements BeanDefinitionRegistryPostProcessor, EnvironmentAware {
    static final String BUILT_IN_CLASS = "org.apache.linkis.manager.rm.service.impl.DefaultResourceManager";
    private static final String BEAN = "defaultResourceManager";

    private Environment environment;

    @Override
    public void setEnvironment(Environment environment) {
        this.environment = environment;
    }

    @Override
    public void postProcessBeanDefinitionRegistry(BeanDefinitionRegistry registry) {
        LinkisVersion.check();
        // Reports mistakes in the settings before any bean is created.
        Settings.of(environment);
        BeanDefinition definition = registry.containsBeanDefinition(BEAN) ? registry.getBeanDefinition(BEAN) : null;
        if (definition == null || !BUILT_IN_CLASS.equals(definition.getBeanClassName())) {
            throw new SettingException(Settings.ENABLED, "Linkis's bean " + BEAN + " is "
                    + (definition == null ? "not there" : "a " + definition.getBeanClassName())
                    + ": this adapter replaces " + BUILT_IN_CLASS + " alone. To run without it: " + Settings.line(Settings.ENABLED, "false"));
        }
        definition.setBeanClassName(RemoteResourceManager.class.getName());
    }

    @Override
    public void postProcessBeanFactory(ConfigurableListableBeanFactory factory) {
        // The registry has all changes.
    }
}
