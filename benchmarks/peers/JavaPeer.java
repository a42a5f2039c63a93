import java.io.BufferedWriter;
import java.lang.management.ManagementFactory;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.Paths;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ConcurrentLinkedQueue;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.Semaphore;
import java.util.concurrent.atomic.AtomicLong;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendCallback;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.selector.SelectMessageQueueByHash;
import org.apache.rocketmq.common.message.Message;

/**
 * The official Java client as a yardstick: sends for a time or a count and prints one JSON line.
 *
 * <p>Usage: JavaPeer key=value ... with nameServer, topic, mode (sync | hash | async | autobatch |
 * batch), messages or seconds, size, threads, inflight, batch, warmup, fault (true: latency fault
 * tolerance and detector on), delay (a delay level), numbers (a file for the numbers of the messages that were
 * acknowledged). It prints READY when it is warm and goes on when it reads a line, or the end of
 * its input. A pause is the longest time in which no send ended well.
 */
public final class JavaPeer {
    private static final AtomicLong OK = new AtomicLong();
    private static final AtomicLong FAILED = new AtomicLong();
    private static final AtomicLong LONGEST_NS = new AtomicLong();
    private static final AtomicLong LAST_OK_NS = new AtomicLong();
    private static final AtomicLong PAUSE_NS = new AtomicLong();
    private static final Map<String, AtomicLong> CAUSES = new ConcurrentHashMap<>();
    private static final ConcurrentLinkedQueue<Long> ACKED = new ConcurrentLinkedQueue<>();
    private static Map<String, String> options = new HashMap<>();

    public static void main(String[] arguments) throws Exception {
        for (String argument : arguments) {
            int at = argument.indexOf('=');
            options.put(argument.substring(0, at), argument.substring(at + 1));
        }
        DefaultMQProducer producer = new DefaultMQProducer("java-peer");
        producer.setNamesrvAddr(options.get("nameServer"));
        boolean fault = Boolean.parseBoolean(options.getOrDefault("fault", "false"));
        producer.setSendLatencyFaultEnable(fault);
        producer.setStartDetectorEnable(fault);
        if (options.get("mode").equals("autobatch")) {
            producer.setAutoBatch(true);
        }
        producer.start();
        long warmup = number("warmup", 0);
        if (warmup > 0) {
            run(producer, warmup, Long.MAX_VALUE);
        }
        OK.set(0);
        FAILED.set(0);
        LONGEST_NS.set(0);
        PAUSE_NS.set(0);
        CAUSES.clear();
        ACKED.clear();
        System.out.println("READY");
        System.out.flush();
        System.in.read();
        double cpu = cpuSeconds();
        long began = System.nanoTime();
        LAST_OK_NS.set(began);
        long seconds = number("seconds", 0);
        long until = seconds > 0 ? began + seconds * 1_000_000_000L : Long.MAX_VALUE;
        run(producer, seconds > 0 ? Long.MAX_VALUE : number("messages", 10_000), until);
        double took = (System.nanoTime() - began) / 1e9;
        double used = cpuSeconds() - cpu;
        if (options.containsKey("numbers")) {
            writeNumbers(Paths.get(options.get("numbers")));
        }
        print(took, used);
        producer.shutdown();
        System.exit(0);
    }

    private static void writeNumbers(Path file) throws Exception {
        try (BufferedWriter writer = Files.newBufferedWriter(file)) {
            for (long number : ACKED) {
                writer.write("acked " + number + "\n");
            }
        }
    }

    private static void run(DefaultMQProducer producer, long messages, long until)
            throws Exception {
        int threads = (int) number("threads", 1);
        CountDownLatch done = new CountDownLatch(threads);
        AtomicLong left = new AtomicLong(messages);
        Semaphore window = new Semaphore((int) number("inflight", 400));
        for (int thread = 0; thread < threads; thread++) {
            new Thread(() -> {
                try {
                    send(producer, left, until, window);
                } finally {
                    done.countDown();
                }
            }).start();
        }
        done.await();
        window.acquire((int) number("inflight", 400));
    }

    private static void send(
            DefaultMQProducer producer, AtomicLong left, long until, Semaphore window) {
        String mode = options.get("mode");
        int batch = (int) number("batch", 1000);
        while (System.nanoTime() < until) {
            int count = mode.equals("batch") ? batch : 1;
            long rest = left.getAndAdd(-count);
            if (rest <= 0) {
                return;
            }
            long began = System.nanoTime();
            try {
                if (mode.equals("sync")) {
                    producer.send(message(rest));
                    succeeded(began, rest, 1);
                } else if (mode.equals("hash")) {
                    producer.send(message(rest), new SelectMessageQueueByHash(), "key" + rest % 1000);
                    succeeded(began, rest, 1);
                } else if (mode.equals("batch")) {
                    List<Message> list = new ArrayList<>(count);
                    for (int index = 0; index < Math.min(count, rest); index++) {
                        list.add(message(rest - index));
                    }
                    producer.send(list);
                    succeeded(began, rest, list.size());
                } else {
                    window.acquire();
                    producer.send(message(rest), callback(System.nanoTime(), rest, window));
                }
            } catch (Exception error) {
                failed(began, error);
                if (mode.equals("async") || mode.equals("autobatch")) {
                    window.release();
                }
            }
        }
    }

    /** Counts, and then makes room: a run is over, and its counters are read, with all room back. */
    private static SendCallback callback(long began, long number, Semaphore window) {
        return new SendCallback() {
            @Override
            public void onSuccess(SendResult result) {
                succeeded(began, number, 1);
                window.release();
            }

            @Override
            public void onException(Throwable error) {
                failed(began, error);
                window.release();
            }
        };
    }

    private static Message message(long number) {
        byte[] body = new byte[(int) number("size", 256)];
        byte[] text = Long.toString(number).getBytes(StandardCharsets.US_ASCII);
        System.arraycopy(text, 0, body, 0, Math.min(text.length, body.length));
        Message message = new Message(options.get("topic"), "tag", "key" + number, body);
        if (options.containsKey("delay")) {
            message.setDelayTimeLevel((int) number("delay", 0));
        }
        return message;
    }

    /** The messages from {@code number} down, so many, are stored. */
    private static void succeeded(long began, long number, int count) {
        long now = System.nanoTime();
        OK.addAndGet(count);
        if (options.containsKey("numbers")) {
            for (int index = 0; index < count; index++) {
                ACKED.add(number - index);
            }
        }
        LONGEST_NS.accumulateAndGet(now - began, Math::max);
        PAUSE_NS.accumulateAndGet(now - LAST_OK_NS.getAndSet(now), Math::max);
    }

    private static void failed(long began, Throwable error) {
        FAILED.incrementAndGet();
        LONGEST_NS.accumulateAndGet(System.nanoTime() - began, Math::max);
        CAUSES.computeIfAbsent(error.getClass().getSimpleName(), key -> new AtomicLong())
                .incrementAndGet();
    }

    private static double cpuSeconds() {
        return ((com.sun.management.OperatingSystemMXBean)
                        ManagementFactory.getOperatingSystemMXBean()).getProcessCpuTime() / 1e9;
    }

    private static long number(String name, long otherwise) {
        return Long.parseLong(options.getOrDefault(name, Long.toString(otherwise)));
    }

    private static void print(double seconds, double cpu) {
        StringBuilder causes = new StringBuilder();
        for (Map.Entry<String, AtomicLong> cause : new TreeMap<>(CAUSES).entrySet()) {
            causes.append(causes.length() == 0 ? "" : ",")
                    .append('"').append(cause.getKey()).append("\":").append(cause.getValue());
        }
        System.out.println(String.format(
                "{\"ok\":%d,\"failed\":%d,\"seconds\":%.3f,\"cpu_s\":%.3f,\"longest_ms\":%.1f,"
                        + "\"pause_ms\":%.1f,\"causes\":{%s}}",
                OK.get(), FAILED.get(), seconds, cpu, LONGEST_NS.get() / 1e6,
                PAUSE_NS.get() / 1e6, causes));
    }
}
