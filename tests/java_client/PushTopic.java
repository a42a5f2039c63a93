import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.MessageExt;

/**
 * Consumes so many messages of a topic as applications do, one at a time.
 *
 * <p>Usage: PushTopic NAME_SERVER TOPIC COUNT
 */
public final class PushTopic {
    public static void main(String[] arguments) throws Exception {
        CountDownLatch missing = new CountDownLatch(Integer.parseInt(arguments[2]));
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer("push-" + arguments[1]);
        consumer.setNamesrvAddr(arguments[0]);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        // Else the end of the process may come before the position of the last message is noted.
        consumer.setAwaitTerminationMillisWhenShutdown(10_000);
        consumer.subscribe(arguments[1], "*");
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            for (MessageExt message : messages) {
                System.out.println("judge message " + message.getMsgId());
                missing.countDown();
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        boolean isWhole = missing.await(200, TimeUnit.SECONDS);
        consumer.shutdown();
        System.out.println(isWhole ? "judge end" : "some messages did not come");
        System.exit(0);
    }
}
