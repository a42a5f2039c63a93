import java.util.List;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;
import org.apache.rocketmq.client.consumer.DefaultMQPullConsumer;
import org.apache.rocketmq.client.consumer.PopCallback;
import org.apache.rocketmq.client.consumer.PopResult;
import org.apache.rocketmq.client.impl.MQClientAPIImpl;
import org.apache.rocketmq.client.impl.factory.MQClientInstance;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;
import org.apache.rocketmq.remoting.protocol.header.PopMessageRequestHeader;

/**
 * Pops messages with priorities as the consumers of RocketMQ 5.5 do.
 *
 * <p>Usage: PopTopic NAME_SERVER TOPIC COUNT. Lines: "popped PRIORITY BODY" in the order of arrival.
 */
public final class PopTopic {
    private static final long TIMEOUT_MS = 30_000;

    public static void main(String[] arguments) throws Exception {
        Thread.setDefaultUncaughtExceptionHandler((thread, error) -> {
            error.printStackTrace();
            System.exit(1);
        });
        DefaultMQPullConsumer consumer = new DefaultMQPullConsumer("java-pop");
        consumer.setNamesrvAddr(arguments[0]);
        consumer.start();
        String topic = arguments[1];
        MessageQueue queue = consumer.fetchSubscribeMessageQueues(topic).iterator().next();
        client(consumer).updateTopicRouteInfoFromNameServer(topic);
        pop(consumer, queue, Integer.parseInt(arguments[2]));
        System.out.println("judge end");
        System.out.flush();
        consumer.shutdown();
        System.exit(0);
    }

    private static MQClientInstance client(DefaultMQPullConsumer consumer) {
        return consumer.getDefaultMQPullConsumerImpl().getRebalanceImpl().getmQClientFactory();
    }

    private static void pop(DefaultMQPullConsumer consumer, MessageQueue queue, int count)
            throws Exception {
        MQClientInstance client = client(consumer);
        String address = client.findBrokerAddressInPublish(queue.getBrokerName());
        PopMessageRequestHeader header = new PopMessageRequestHeader();
        header.setConsumerGroup("java-pop");
        header.setTopic(queue.getTopic());
        header.setQueueId(-1);
        header.setMaxMsgNums(32);
        header.setInvisibleTime(600_000);
        header.setPollTime(0);
        header.setInitMode(0);
        header.setExpType("TAG");
        header.setExp("*");
        for (int read = 0, rounds = 0; read < count && rounds < 10_000; rounds++) {
            header.setBornTime(System.currentTimeMillis());
            List<MessageExt> messages =
                pop(client.getMQClientAPIImpl(), queue.getBrokerName(), address, header);
            if (messages == null) {
                Thread.sleep(50);
                continue;
            }
            for (MessageExt message : messages) {
                System.out.println(
                    "judge popped " + message.getPriority() + " " + new String(message.getBody()));
            }
            read += messages.size();
        }
    }

    private static List<MessageExt> pop(
            MQClientAPIImpl api, String broker, String address, PopMessageRequestHeader header)
            throws Exception {
        CompletableFuture<PopResult> result = new CompletableFuture<>();
        api.popMessageAsync(broker, address, header, TIMEOUT_MS, new PopCallback() {
            @Override
            public void onSuccess(PopResult popped) {
                result.complete(popped);
            }

            @Override
            public void onException(Throwable error) {
                result.completeExceptionally(error);
            }
        });
        return result.get(TIMEOUT_MS, TimeUnit.MILLISECONDS).getMsgFoundList();
    }
}
