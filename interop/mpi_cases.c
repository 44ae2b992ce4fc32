/*
 * Open MPI over UCX with every byte checked: ping-pong and allreduce of increasing sizes.
 *
 *   mpirun -np 2 mpi_cases
 */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

enum { LARGEST = 4 << 20, ROUNDS = 20 };

static unsigned char expected(int size, int round, int at)
{
    return (unsigned char)(size * 31 + round * 7 + at);
}

static void fail(const char *what, int size, int round)
{
    fprintf(stderr, "%s of %d bytes, round %d: wrong data\n", what, size, round);
    MPI_Abort(MPI_COMM_WORLD, 1);
}

/* The message returns unchanged; rank 1 checks it too. */
static void ping_pong(int rank, unsigned char *buffer, int size)
{
    double began = MPI_Wtime();
    for (int round = 0; round < ROUNDS; round++) {
        if (rank == 0) {
            for (int at = 0; at < size; at++)
                buffer[at] = expected(size, round, at);
            MPI_Send(buffer, size, MPI_BYTE, 1, round, MPI_COMM_WORLD);
        }
        if (rank < 2)
            MPI_Recv(buffer, size, MPI_BYTE, 1 - rank, round, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        for (int at = 0; at < size; at++)
            if (buffer[at] != expected(size, round, at))
                fail("ping-pong", size, round);
        if (rank == 1)
            MPI_Send(buffer, size, MPI_BYTE, 0, round, MPI_COMM_WORLD);
    }
    if (rank == 0)
        printf("ping-pong %d bytes: %.1f us\n", size, (MPI_Wtime() - began) / ROUNDS * 5e5);
}

/* Every rank can compute the sums itself. */
static void allreduce(int rank, int ranks, long *mine, long *sum, int count)
{
    double began = MPI_Wtime();
    for (int round = 0; round < ROUNDS; round++) {
        for (int at = 0; at < count; at++)
            mine[at] = (long)(rank + 1) * (at + round);
        MPI_Allreduce(mine, sum, count, MPI_LONG, MPI_SUM, MPI_COMM_WORLD);
        for (int at = 0; at < count; at++)
            if (sum[at] != (long)ranks * (ranks + 1) / 2 * (at + round))
                fail("allreduce", count * (int)sizeof(long), round);
    }
    if (rank == 0)
        printf("allreduce %d bytes: %.1f us\n", count * (int)sizeof(long),
               (MPI_Wtime() - began) / ROUNDS * 1e6);
}

int main(int argc, char **argv)
{
    int rank, ranks;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    unsigned char *buffer = malloc(LARGEST);
    long *sum = malloc(LARGEST);
    if (ranks != 2 || !buffer || !sum) {
        fprintf(stderr, "two ranks, please\n");
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
    for (int size = 1; size <= LARGEST; size *= 4)
        ping_pong(rank, buffer, size);
    for (int size = 8; size <= LARGEST; size *= 4)
        allreduce(rank, ranks, (long *)(void *)buffer, sum, size / (int)sizeof(long));
    free(buffer);
    free(sum);
    if (rank == 0)
        printf("as expected\n");
    MPI_Finalize();
    return 0;
}
