/* Ping-pong and bandwidth of an MPI library, for `cargo xtask bench fabric`.
 *
 * mpi_bench latency SIZE ROUNDS     median half round trip in microseconds, of batches of 100 rounds
 * mpi_bench bandwidth SIZE MESSAGES GB/s with a window of eight messages
 */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BATCH = 100, WINDOW = 8, WARM_UP = 200 };

static int compare(const void *a, const void *b)
{
    double left = *(const double *)a, right = *(const double *)b;
    return (left > right) - (left < right);
}

static void round_trip(char *buffer, int size, int rank)
{
    if (rank == 0)
        MPI_Send(buffer, size, MPI_CHAR, 1, 0, MPI_COMM_WORLD);
    MPI_Recv(buffer, size, MPI_CHAR, 1 - rank, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    if (rank == 1)
        MPI_Send(buffer, size, MPI_CHAR, 0, 0, MPI_COMM_WORLD);
}

static double latency(char *buffer, int size, int rounds, int rank)
{
    int batches = rounds / BATCH > 0 ? rounds / BATCH : 1;
    double *times = malloc(batches * sizeof *times);
    for (int i = 0; i < WARM_UP; i++)
        round_trip(buffer, size, rank);
    for (int batch = 0; batch < batches; batch++) {
        double began = MPI_Wtime();
        for (int i = 0; i < BATCH; i++)
            round_trip(buffer, size, rank);
        times[batch] = (MPI_Wtime() - began) * 1e6 / BATCH / 2;
    }
    qsort(times, batches, sizeof *times, compare);
    double median = times[batches / 2];
    free(times);
    return median;
}

static double bandwidth(char *buffer, int size, int messages, int rank)
{
    MPI_Request requests[WINDOW];
    char word = 0;
    double began = 0;
    int rounds = messages / WINDOW;
    for (int round = -2; round < rounds; round++) {
        if (round == 0)
            began = MPI_Wtime();
        for (int i = 0; i < WINDOW; i++) {
            if (rank == 0)
                MPI_Isend(buffer, size, MPI_CHAR, 1, 0, MPI_COMM_WORLD, &requests[i]);
            else
                MPI_Irecv(buffer, size, MPI_CHAR, 0, 0, MPI_COMM_WORLD, &requests[i]);
        }
        MPI_Waitall(WINDOW, requests, MPI_STATUSES_IGNORE);
        if (rank == 0)
            MPI_Recv(&word, 1, MPI_CHAR, 1, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        else
            MPI_Send(&word, 1, MPI_CHAR, 0, 1, MPI_COMM_WORLD);
    }
    return (double)size * WINDOW * rounds / (MPI_Wtime() - began) / 1e9;
}

int main(int argc, char **argv)
{
    int rank;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    int size = argc > 3 ? atoi(argv[2]) : 0, count = argc > 3 ? atoi(argv[3]) : 0;
    if (size <= 0 || count <= 0) {
        fprintf(stderr, "usage: mpi_bench latency|bandwidth SIZE COUNT\n");
        MPI_Abort(MPI_COMM_WORLD, 2);
    }
    char *buffer = malloc(size);
    memset(buffer, 1, size);
    int is_latency = strcmp(argv[1], "latency") == 0;
    double figure = (is_latency ? latency : bandwidth)(buffer, size, count, rank);
    if (rank == 0)
        printf("%.4f\n", figure);
    free(buffer);
    MPI_Finalize();
    return 0;
}
