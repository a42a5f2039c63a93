from tests.clusters import scripted_cluster

cluster = scripted_cluster(t=4)
