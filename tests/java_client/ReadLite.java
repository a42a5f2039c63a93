import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import org.apache.rocketmq.client.apis.ClientConfiguration;
import org.apache.rocketmq.client.apis.ClientServiceProvider;
import org.apache.rocketmq.client.apis.consumer.ConsumeResult;
import org.apache.rocketmq.client.apis.consumer.LitePushConsumer;
import org.apache.rocketmq.client.apis.message.MessageView;

/**
 * Reads the lite topics PREFIX0, PREFIX1, ... by the lite consumers of RocketMQ's gRPC client.
 *
 * <p>Usage: ReadLite ENDPOINTS GROUP TOPIC PREFIX SESSIONS CONSUMERS MESSAGES SECONDS. Each consumer
 * subscribes to its share of the lite topics. Lines: "lite LITE_TOPIC BODY" in the order of arrival,
 * until there are MESSAGES of them and two more seconds have passed, or after SECONDS.
 */
public final class ReadLite {
    private static final int GRACE_MS = 2_000;

    public static void main(String[] arguments) throws Exception {
        String prefix = arguments[3];
        int sessions = Integer.parseInt(arguments[4]);
        int consumers = Integer.parseInt(arguments[5]);
        CountDownLatch missing = new CountDownLatch(Integer.parseInt(arguments[6]));
        ClientServiceProvider provider = ClientServiceProvider.loadService();
        ClientConfiguration configuration = ClientConfiguration.newBuilder()
            .setEndpoints(arguments[0]).enableSsl(false).build();
        List<LitePushConsumer> open = new ArrayList<>();
        for (int consumer = 0; consumer < consumers; consumer++) {
            LitePushConsumer lite = provider.newLitePushConsumerBuilder()
                .setClientConfiguration(configuration)
                .setConsumerGroup(arguments[1])
                .bindTopic(arguments[2])
                .setMessageListener(message -> print(message, missing))
                .build();
            open.add(lite);
            for (int session = consumer; session < sessions; session += consumers) {
                lite.subscribeLite(prefix + session);
            }
        }
        missing.await(Long.parseLong(arguments[7]), TimeUnit.SECONDS);
        Thread.sleep(GRACE_MS);
        synchronized (System.out) {
            System.out.println("judge end");
            System.out.flush();
            System.exit(0);
        }
    }

    private static ConsumeResult print(MessageView message, CountDownLatch missing) {
        String body = StandardCharsets.UTF_8.decode(message.getBody()).toString();
        synchronized (System.out) {
            System.out.println("judge lite " + message.getLiteTopic().orElse("-") + " " + body);
        }
        missing.countDown();
        return ConsumeResult.SUCCESS;
    }
}
