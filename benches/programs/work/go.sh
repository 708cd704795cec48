# Goroutines that allocate and free through cgo.
export GOCACHE="$PWD/cache" GOFLAGS=-mod=mod CGO_ENABLED=1 HOME="$PWD"
cat > main.go <<'GO'
package main

/*
#include <stdlib.h>
#include <string.h>
static void *fill(size_t size, int mark) { void *p = malloc(size); if (p) memset(p, mark, size); return p; }
*/
import "C"
import ("fmt"; "sync"; "unsafe")

func main() {
	var group sync.WaitGroup
	sums := make([]int, 8)
	for g := range sums {
		group.Add(1)
		go func(g int) {
			defer group.Done()
			for i := 0; i < 50000; i++ {
				p := C.fill(C.size_t(i%5000+1), C.int(i%256))
				sums[g] += int(*(*byte)(p))
				C.free(unsafe.Pointer(p))
			}
		}(g)
	}
	group.Wait()
	fmt.Println(sums)
}
GO
go build -o program main.go
./program
