//! Access table: the permission of each role on each call of the API, of reflection and of health, by gRPC path.
//!
//! A call that is not in the table is not served. The table decides by role only; a service checks the EMs and users of a
//! call itself (invariant 14 of ARCHITECTURE.md). Callers: `authenticator`, once per call, and the help of the `tokens`
//! command.

use std::collections::HashMap;

use rm_model::access::{
    CallScope, Denied,
    Permission::{self, All, No, Own},
    Rights, Role,
};

/// Permissions of each role on one call.
#[derive(Debug, Clone, Copy)]
pub struct AccessRow {
    /// gRPC path, such as `/linkis.rm.v1.UsageService/GetEm`.
    pub method: &'static str,
    permissions: [Permission; Role::ALL.len()],
}

/// Calls that need no authentication, so that load balancers need no credentials.
const FREE: [&str; 2] = ["/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"];

/// Permissions by call. `Own` covers the EMs or users that the caller is bound to. A manager or viewer that is bound to
/// no user has everything.
#[rustfmt::skip]
static TABLE: [AccessRow; 61] = [
    //                                                                     ecm  manager viewer operator admin
    row("/linkis.rm.v1.ResourceManagerService/Register",                  [Own, No,     No,    No,      All]),
    row("/linkis.rm.v1.ResourceManagerService/Unregister",                [Own, No,     No,    No,      All]),
    row("/linkis.rm.v1.ResourceManagerService/Heartbeat",                 [Own, No,     No,    No,      All]),
    row("/linkis.rm.v1.ResourceManagerService/RequestResource",           [Own, Own,    No,    No,      All]),
    row("/linkis.rm.v1.ResourceManagerService/ResourceInited",            [Own, Own,    No,    No,      All]),
    row("/linkis.rm.v1.ResourceManagerService/ResourceReported",          [Own, Own,    No,    No,      All]),
    row("/linkis.rm.v1.ResourceManagerService/ResourceReleased",          [Own, Own,    No,    No,      All]),
    row("/linkis.rm.v1.UsageService/GetServerInfo",                       [All, All,    All,   All,     All]),
    row("/linkis.rm.v1.UsageService/GetEm",                               [Own, All,    All,   All,     All]),
    row("/linkis.rm.v1.UsageService/BatchGetEms",                         [Own, All,    All,   All,     All]),
    row("/linkis.rm.v1.UsageService/ListEms",                             [No,  All,    All,   All,     All]),
    row("/linkis.rm.v1.UsageService/GetTicket",                           [No,  Own,    Own,   All,     All]),
    row("/linkis.rm.v1.UsageService/BatchGetTickets",                     [No,  Own,    Own,   All,     All]),
    row("/linkis.rm.v1.UsageService/ListTickets",                         [No,  Own,    Own,   All,     All]),
    row("/linkis.rm.v1.UsageService/ListScopes",                          [No,  Own,    Own,   All,     All]),
    row("/linkis.rm.v1.UsageService/ListWaiting",                         [No,  Own,    Own,   All,     All]),
    row("/linkis.rm.v1.UsageService/ListReclaims",                        [No,  Own,    Own,   All,     All]),
    row("/linkis.rm.v1.UsageService/ListActions",                         [No,  Own,    Own,   All,     All]),
    row("/linkis.rm.v1.UsageService/GetOverview",                         [No,  Own,    Own,   All,     All]),
    row("/linkis.rm.v1.UsageService/Watch",                               [No,  Own,    Own,   All,     All]),
    row("/linkis.rm.v1.UsageService/ListInstances",                       [No,  All,    All,   All,     All]),
    row("/linkis.rm.v1.UsageService/ListTasks",                           [No,  All,    All,   All,     All]),
    row("/linkis.rm.v1.UsageService/ListRefusals",                        [No,  Own,    Own,   All,     All]),
    row("/linkis.rm.v1.UsageService/GetUsage",                            [No,  Own,    Own,   All,     All]),
    row("/linkis.rm.v1.UsageService/ListUsers",                           [No,  Own,    Own,   All,     All]),
    row("/linkis.rm.v1.UsageService/GetScope",                            [No,  Own,    Own,   All,     All]),
    row("/linkis.rm.v1.UsageService/FollowActions",                       [No,  Own,    Own,   All,     All]),
    row("/linkis.rm.v1.LimitService/ListLimits",                          [No,  Own,    Own,   All,     All]),
    row("/linkis.rm.v1.LimitService/ListPolicies",                        [No,  All,    All,   All,     All]),
    row("/linkis.rm.v1.LimitService/GetOrder",                            [No,  All,    All,   All,     All]),
    row("/linkis.rm.v1.LimitService/ListPriorities",                      [No,  All,    All,   All,     All]),
    row("/linkis.rm.v1.LimitService/ListReclaimPolicies",                 [No,  All,    All,   All,     All]),
    row("/linkis.rm.v1.LimitService/SetLimit",                            [No,  No,     No,    No,      All]),
    row("/linkis.rm.v1.LimitService/DeleteLimit",                         [No,  No,     No,    No,      All]),
    row("/linkis.rm.v1.LimitService/ReplaceLimits",                       [No,  No,     No,    No,      All]),
    row("/linkis.rm.v1.LimitService/SetPolicy",                           [No,  No,     No,    No,      All]),
    row("/linkis.rm.v1.LimitService/SetOrder",                            [No,  No,     No,    No,      All]),
    row("/linkis.rm.v1.LimitService/SetPriority",                         [No,  No,     No,    No,      All]),
    row("/linkis.rm.v1.LimitService/DeletePriority",                      [No,  No,     No,    No,      All]),
    row("/linkis.rm.v1.LimitService/SetReclaimPolicy",                    [No,  No,     No,    No,      All]),
    row("/linkis.rm.v1.LimitService/DeleteReclaimPolicy",                 [No,  No,     No,    No,      All]),
    row("/linkis.rm.v1.AdminService/Audit",                               [No,  No,     No,    All,     All]),
    row("/linkis.rm.v1.AdminService/Repair",                              [No,  No,     No,    All,     All]),
    row("/linkis.rm.v1.AdminService/AdoptTicket",                         [No,  No,     No,    No,      All]),
    row("/linkis.rm.v1.AdminService/Drain",                               [Own, No,     No,    All,     All]),
    row("/linkis.rm.v1.AdminService/Resume",                              [Own, No,     No,    All,     All]),
    row("/linkis.rm.v1.AdminService/ForceRelease",                        [No,  No,     No,    All,     All]),
    row("/linkis.rm.v1.AdminService/RemoveWaiting",                       [No,  No,     No,    All,     All]),
    row("/linkis.rm.v1.AdminService/WithdrawReclaim",                     [No,  No,     No,    All,     All]),
    row("/linkis.rm.v1.AdminService/Hold",                                [No,  No,     No,    All,     All]),
    row("/linkis.rm.v1.AdminService/ReleaseHold",                         [No,  No,     No,    All,     All]),
    row("/linkis.rm.v1.AdminService/ListHolds",                           [No,  No,     No,    All,     All]),
    row("/linkis.rm.v1.ExternalResourceService/PutProvider",              [No,  No,     No,    No,      All]),
    row("/linkis.rm.v1.ExternalResourceService/DeleteProvider",           [No,  No,     No,    No,      All]),
    row("/linkis.rm.v1.ExternalResourceService/ListProviders",            [No,  No,     No,    All,     All]),
    row("/linkis.rm.v1.ExternalResourceService/CheckProvider",            [No,  No,     No,    All,     All]),
    row("/linkis.rm.v1.ExternalResourceService/GetQueue",                 [No,  All,    All,   All,     All]),
    row("/linkis.rm.v1.ExternalResourceService/ListQueues",               [No,  All,    All,   All,     All]),
    row("/linkis.rm.v1.ExternalResourceService/ListApplications",         [No,  Own,    Own,   All,     All]),
    row("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",      [All, All,    All,   All,     All]),
    row("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", [All, All,    All,   All,     All]),
];

const fn row(method: &'static str, permissions: [Permission; Role::ALL.len()]) -> AccessRow {
    AccessRow { method, permissions }
}

impl AccessRow {
    /// Returns the permission of `role` on the call.
    pub fn permission(&self, role: Role) -> Permission {
        let [ecm, manager, viewer, operator, admin] = self.permissions;
        match role {
            Role::Ecm => ecm,
            Role::Manager => manager,
            Role::Viewer => viewer,
            Role::Operator => operator,
            Role::Admin => admin,
        }
    }

    /// Returns true if only operators and administrators have a permission on the call.
    pub fn is_of_administrators(&self) -> bool {
        [Role::Ecm, Role::Manager, Role::Viewer].into_iter().all(|role| self.permission(role) == No)
    }

    /// Returns the part of the call that `rights` allow.
    ///
    /// # Errors
    /// [`Denied`] if no role of the caller has a permission on the call.
    pub fn reach(&self, rights: &Rights) -> Result<CallScope, Denied> {
        CallScope::of(rights, |role| self.permission(role)).ok_or_else(|| {
            let roles: Vec<_> = Role::ALL.into_iter().filter(|role| self.permission(*role) != No).collect();
            let needs: Vec<_> = roles.into_iter().map(Role::as_str).collect();
            Denied { roles: rights.role_names(), needs: format!("one of the roles {}", needs.join(", ")) }
        })
    }
}

/// Identity that a call requires.
#[derive(Debug, Clone, Copy)]
pub enum RequiredIdentity {
    /// No identity.
    Nothing,
    /// An authenticated caller, one of whose roles has a permission in this row.
    Role(&'static AccessRow),
}

/// The required identity by gRPC path.
#[derive(Debug)]
pub struct AccessTable(HashMap<&'static str, RequiredIdentity>);

impl Default for AccessTable {
    fn default() -> Self {
        let free = FREE.into_iter().map(|method| (method, RequiredIdentity::Nothing));
        Self(free.chain(TABLE.iter().map(|row| (row.method, RequiredIdentity::Role(row)))).collect())
    }
}

impl AccessTable {
    /// Returns the required identity of the call at `path`; `None` if no such call exists.
    pub fn needed(&self, path: &str) -> Option<RequiredIdentity> {
        self.0.get(path).copied()
    }
}
