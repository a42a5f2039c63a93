import com.google.common.hash.Hashing;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.List;
import org.apache.rocketmq.broker.BrokerController;
import org.apache.rocketmq.broker.lite.LiteShardingImpl;
import org.apache.rocketmq.broker.topic.TopicRouteInfoManager;
import org.apache.rocketmq.client.impl.producer.TopicPublishInfo;
import org.apache.rocketmq.common.lite.LiteUtil;
import org.apache.rocketmq.common.message.MessageQueue;

/**
 * Prints where RocketMQ places lite topics: the broker by the broker's own LiteShardingImpl, the
 * queue by the proxy's expression (SendMessageActivity).
 *
 * <p>Usage: PlaceLite TOPIC BROKER:QUEUES,BROKER:QUEUES... The brokers are in the route's order;
 * lite topics come by standard input, a line each. Lines: "place LITE_TOPIC BROKER QUEUE_INDEX".
 */
public final class PlaceLite {
    public static void main(String[] arguments) throws Exception {
        String topic = arguments[0];
        List<MessageQueue> queues = new ArrayList<>();
        for (String broker : arguments[1].split(",")) {
            String[] parts = broker.split(":");
            for (int queue = 0; queue < Integer.parseInt(parts[1]); queue++) {
                queues.add(new MessageQueue(topic, parts[0], queue));
            }
        }
        TopicPublishInfo info = new TopicPublishInfo();
        info.setMessageQueueList(queues);
        LiteShardingImpl sharding = new LiteShardingImpl(null, new Routes(info));
        BufferedReader names =
            new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String name = names.readLine(); name != null; name = names.readLine()) {
            String broker = sharding.shardingByLmqName(topic, LiteUtil.toLmqName(topic, name));
            int queue = Hashing.consistentHash(name.hashCode(), queues.size());
            System.out.println("judge place " + name + " " + broker + " " + queue);
        }
        System.out.println("judge end");
    }

    private static final class Routes extends TopicRouteInfoManager {
        private final TopicPublishInfo info;

        Routes(TopicPublishInfo info) {
            super((BrokerController) null);
            this.info = info;
        }

        @Override
        public TopicPublishInfo tryToFindTopicPublishInfo(String topic) {
            return info;
        }
    }
}
