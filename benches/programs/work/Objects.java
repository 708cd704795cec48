import java.nio.ByteBuffer;
import java.util.*;
import java.util.zip.*;

/** Objects, direct buffers and native compression. */
public class Objects {
    public static void main(String[] arguments) throws Exception {
        CRC32 sum = new CRC32();
        for (int i = 0; i < 300; i++) {
            Map<Integer, String> map = new TreeMap<>();
            for (int j = 0; j < 3000; j++) map.put(j * 7919 % 3001, "row" + i * j);
            byte[] text = map.toString().getBytes();
            ByteBuffer buffer = ByteBuffer.allocateDirect(text.length);
            buffer.put(text).flip();
            Deflater deflater = new Deflater();
            deflater.setInput(text);
            deflater.finish();
            byte[] packed = new byte[text.length + 64];
            sum.update(packed, 0, deflater.deflate(packed));
            deflater.end();
            sum.update(buffer);
        }
        System.out.println(sum.getValue());
    }
}
