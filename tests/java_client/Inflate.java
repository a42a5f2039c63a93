import java.util.Scanner;
import org.apache.rocketmq.common.compression.CompressionType;
import org.apache.rocketmq.common.compression.CompressorFactory;

/**
 * Inflates bodies as the official consumer does. Each line of standard input, a compression type and
 * the body in hex, is answered by "inflated" with the body in hex after an x, or by "refused".
 */
public final class Inflate {
    public static void main(String[] arguments) {
        Scanner lines = new Scanner(System.in);
        while (lines.hasNext()) {
            CompressionType type = CompressionType.valueOf(lines.next());
            byte[] body = bytes(lines.next());
            try {
                print("inflated", CompressorFactory.getCompressor(type).decompress(body));
            } catch (Exception refused) {
                print("refused", new byte[0]);
            }
        }
        System.out.println("judge end");
        System.out.flush();
        System.exit(0);
    }

    private static byte[] bytes(String hex) {
        byte[] data = new byte[hex.length() / 2];
        for (int index = 0; index < data.length; index++) {
            data[index] = (byte) Integer.parseInt(hex.substring(2 * index, 2 * index + 2), 16);
        }
        return data;
    }

    private static void print(String kind, byte[] data) {
        StringBuilder text = new StringBuilder(2 * data.length);
        for (byte one : data) {
            text.append(Character.forDigit(one >> 4 & 15, 16)).append(Character.forDigit(one & 15, 16));
        }
        System.out.println("judge " + kind + " x" + text);
    }
}
