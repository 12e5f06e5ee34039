"""All planted faults."""

from tests.planted_faults.batch_script_faults import BATCH_SCRIPT_FAULTS
from tests.planted_faults.discovery_faults import DISCOVERY_FAULTS
from tests.planted_faults.elastic_leave_faults import ELASTIC_LEAVE_FAULTS
from tests.planted_faults.folder_faults import FOLDER_FAULTS
from tests.planted_faults.gpu_faults import GPU_FAULTS
from tests.planted_faults.network_faults import NETWORK_FAULTS
from tests.planted_faults.offload_faults import OFFLOAD_FAULTS
from tests.planted_faults.peer_limit_faults import PEER_LIMIT_FAULTS
from tests.planted_faults.plan_faults import PLAN_FAULTS
from tests.planted_faults.price_faults import PRICE_FAULTS
from tests.planted_faults.printable_faults import PRINTABLE_FAULTS
from tests.planted_faults.rendezvous_faults import RENDEZVOUS_FAULTS
from tests.planted_faults.runtime_faults import RUNTIME_FAULTS
from tests.planted_faults.secret_faults import SECRET_FAULTS
from tests.planted_faults.slurm_launch_faults import SLURM_LAUNCH_FAULTS
from tests.planted_faults.tls_faults import TLS_FAULTS
from tests.planted_faults.training_faults import TRAINING_FAULTS

FAULTS = (
    *RUNTIME_FAULTS,
    *GPU_FAULTS,
    *PLAN_FAULTS,
    *TRAINING_FAULTS,
    *PRICE_FAULTS,
    *OFFLOAD_FAULTS,
    *PEER_LIMIT_FAULTS,
    *PRINTABLE_FAULTS,
    *FOLDER_FAULTS,
    *SECRET_FAULTS,
    *TLS_FAULTS,
    *RENDEZVOUS_FAULTS,
    *NETWORK_FAULTS,
    *BATCH_SCRIPT_FAULTS,
    *SLURM_LAUNCH_FAULTS,
    *DISCOVERY_FAULTS,
    *ELASTIC_LEAVE_FAULTS,
)
