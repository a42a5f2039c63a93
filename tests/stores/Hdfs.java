import java.io.File;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.hdfs.MiniDFSCluster;

/** A name node and a data node in this process, until standard input ends. Arguments: a folder. */
public class Hdfs {
    public static void main(String[] args) throws Exception {
        MiniDFSCluster cluster =
                new MiniDFSCluster.Builder(new Configuration(), new File(args[0])).build();
        cluster.waitActive();
        System.out.println(cluster.getURI());
        System.in.read();
        cluster.shutdown();
    }
}
