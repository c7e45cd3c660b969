"""A connection to the API server: by the service account inside a cluster, by the kubeconfig outside."""

from __future__ import annotations

from pipeline.errors import LaunchError
from pipeline.launch.kubernetes.api import Api

MOST_CONNECTIONS = 512  # one for the log of every pod, and a few more


def connect(context: str | None = None) -> Api:
    """The API server, with the pod's service account or the kubeconfig's ``context`` (None: the current one).

    A named context comes from the kubeconfig even inside a cluster. Raises LaunchError without credentials.
    """
    from kubernetes.client import ApiClient, Configuration
    from kubernetes.config import ConfigException, load_incluster_config, load_kube_config
    from urllib3.util import Retry

    configuration = Configuration()
    configuration.connection_pool_maxsize = MOST_CONNECTIONS
    configuration.retries = Retry(0, redirect=3)  # ``Api`` asks again; hidden tries would multiply its time limits
    if context is None:
        try:
            load_incluster_config(client_configuration=configuration)
            return Api(ApiClient(configuration))
        except ConfigException:
            pass  # not in a pod
    try:
        load_kube_config(context=context, client_configuration=configuration)
    except Exception as error:  # a kubeconfig may be no YAML, or any other YAML; the client has no class for that
        raise LaunchError(
            "no way into a cluster: neither a pod's service account nor a kubeconfig that fits: "
            f"{' '.join(str(error).split())}",
            hint="run it in the cluster, or set KUBECONFIG, or launch.context=<a context of it>",
        ) from None
    return Api(ApiClient(configuration))
