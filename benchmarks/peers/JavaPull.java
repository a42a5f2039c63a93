import java.lang.management.ManagementFactory;
import java.util.HashMap;
import java.util.Map;
import java.util.Set;
import org.apache.rocketmq.client.consumer.DefaultMQPullConsumer;
import org.apache.rocketmq.client.consumer.PullResult;
import org.apache.rocketmq.client.consumer.PullStatus;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;

/**
 * The official Java client as a yardstick: pulls all messages of a topic, queue by queue in one
 * thread, and prints one JSON line.
 *
 * <p>Usage: JavaPull nameServer=... topic=... messages=N. It reads them once to be warm, prints READY,
 * and reads them again when it reads a line. Of each message it reads body, tags, keys and id.
 */
public final class JavaPull {
    private static long bytes;

    public static void main(String[] arguments) throws Exception {
        Map<String, String> options = new HashMap<>();
        for (String argument : arguments) {
            int at = argument.indexOf('=');
            options.put(argument.substring(0, at), argument.substring(at + 1));
        }
        DefaultMQPullConsumer consumer = new DefaultMQPullConsumer("java-pull");
        consumer.setNamesrvAddr(options.get("nameServer"));
        consumer.start();
        Set<MessageQueue> queues = consumer.fetchSubscribeMessageQueues(options.get("topic"));
        long messages = Long.parseLong(options.get("messages"));
        pull(consumer, queues, messages);
        System.out.println("READY");
        System.out.flush();
        System.in.read();
        double cpu = cpuSeconds();
        long began = System.nanoTime();
        long read = pull(consumer, queues, messages);
        double took = (System.nanoTime() - began) / 1e9;
        System.out.println(String.format(
                "{\"ok\":%d,\"failed\":0,\"seconds\":%.3f,\"cpu_s\":%.3f,\"bytes\":%d}",
                read, took, cpuSeconds() - cpu, bytes));
        consumer.shutdown();
        System.exit(0);
    }

    private static long pull(DefaultMQPullConsumer consumer, Set<MessageQueue> queues, long most)
            throws Exception {
        long read = 0;
        for (MessageQueue queue : queues) {
            long offset = consumer.minOffset(queue);
            long end = consumer.maxOffset(queue);
            while (offset < end && read < most) {
                PullResult result = consumer.pull(queue, "*", offset, 1024);
                if (result.getPullStatus() == PullStatus.FOUND) {
                    for (MessageExt message : result.getMsgFoundList()) {
                        bytes += message.getBody().length + message.getTags().length()
                                + message.getKeys().length() + message.getMsgId().length();
                    }
                    read += result.getMsgFoundList().size();
                }
                offset = result.getNextBeginOffset();
            }
        }
        return read;
    }

    private static double cpuSeconds() {
        return ((com.sun.management.OperatingSystemMXBean)
                        ManagementFactory.getOperatingSystemMXBean()).getProcessCpuTime() / 1e9;
    }
}
