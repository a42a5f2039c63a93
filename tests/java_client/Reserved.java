import java.lang.reflect.Field;
import java.util.Set;
import org.apache.rocketmq.common.message.MessageConst;
import org.apache.rocketmq.common.topic.TopicValidator;

/** Prints the property names and the topics that RocketMQ keeps for itself. */
public final class Reserved {
    public static void main(String[] arguments) throws Exception {
        for (Field field : MessageConst.class.getFields()) {
            if (field.getName().startsWith("PROPERTY_")) {
                print("property", (String) field.get(null));
            }
        }
        print("refused_property", MessageConst.STRING_HASH_SET);
        print("system_topic", TopicValidator.getSystemTopicSet());
        print("refused_topic", TopicValidator.getNotAllowedSendTopicSet());
        System.out.println("judge end");
    }

    private static void print(String kind, Set<String> names) {
        for (String name : names) {
            print(kind, name);
        }
    }

    private static void print(String kind, String name) {
        System.out.println("judge " + kind + " " + name);
    }
}
